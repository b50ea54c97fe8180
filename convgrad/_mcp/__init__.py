"""The Model Context Protocol: tools, resources and a prompt, over HTTP (`app/api/tools.py`) and standard streams."""
