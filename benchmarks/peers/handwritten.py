"""A typical hand-written service: raw bytes in, PyTorch in a thread pool, raw bytes out. Run: handwritten.py PORT."""

from __future__ import annotations

import asyncio
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import torch
import uvicorn
from fastapi import FastAPI, Request, Response

app = FastAPI()
pool = ThreadPoolExecutor(os.cpu_count())


def gradient(body: bytearray, n: int, c: int, h: int, o: int) -> bytes:
    """Return the gradient of a 3x3 convolution's weights; src and diff_dst follow each other in the body."""
    both = torch.frombuffer(body, dtype=torch.float32)
    src = both[: n * c * h * h].view(n, c, h, h)
    diff_dst = both[n * c * h * h :].view(n, o, h, h)
    weights = torch.empty(o, c, 3, 3)
    settings = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1, [False, True, False])
    with torch.inference_mode():
        found = torch.ops.aten.convolution_backward(diff_dst, src, weights, None, *settings)
    return bytes(found[1].contiguous().numpy().data)


@app.post("/gradient")
async def compute(request: Request, n: int, c: int, h: int, o: int) -> Response:
    """Answer one call."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
    reply = await asyncio.get_running_loop().run_in_executor(pool, gradient, body, n, c, h, o)
    return Response(reply, media_type="application/octet-stream")


if __name__ == "__main__":
    port = int(sys.argv[1])
    uvicorn.run(
        app, port=port, loop="uvloop", http="httptools", log_level="warning", access_log=False, timeout_keep_alive=75
    )
