"""What a call does, without a server: check and plan it, then run it on threads. No HTTP, and no asyncio."""
