"""The minimum that a service can do with a call: read its body and return its length. Run: body_only.py PORT."""

from __future__ import annotations

import sys

import uvicorn
from fastapi import FastAPI, Request, Response

app = FastAPI()


@app.post("/gradient")
async def read(request: Request) -> Response:
    """Read one body and discard it."""
    length = 0
    async for chunk in request.stream():
        length += len(chunk)
    return Response(str(length), media_type="text/plain")


if __name__ == "__main__":
    port = int(sys.argv[1])
    uvicorn.run(
        app, port=port, loop="uvloop", http="httptools", log_level="warning", access_log=False, timeout_keep_alive=75
    )
