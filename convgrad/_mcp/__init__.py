"""The Model Context Protocol: tools, resources and a prompt, over HTTP (`app/api/mcp.py`) and standard streams."""
