"""The same PyTorch call behind PyTriton, Triton with models in Python. Run: pytriton_server.py HTTP GRPC METRICS."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig


def gradient(requests: list[Any]) -> list[dict[str, Any]]:
    """Return the gradients of a 3x3 convolution's weights, request by request."""
    replies = []
    for request in requests:
        src, diff_dst = torch.from_numpy(request["src"]), torch.from_numpy(request["diff_dst"])
        weights = torch.empty(diff_dst.shape[1], src.shape[1], 3, 3)
        settings = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1, [False, True, False])
        with torch.inference_mode():
            found = torch.ops.aten.convolution_backward(diff_dst, src, weights, None, *settings)
        replies.append({"diff_weights": found[1].contiguous().numpy()})
    return replies


if __name__ == "__main__":
    http, grpc, metrics = map(int, sys.argv[1:4])
    config = TritonConfig(http_port=http, grpc_port=grpc, metrics_port=metrics, http_address="127.0.0.1")
    any_shape = (-1, -1, -1, -1)
    with Triton(config=config) as triton:
        triton.bind(
            model_name="gradient",
            infer_func=gradient,
            inputs=[Tensor(name=name, dtype=np.float32, shape=any_shape) for name in ("src", "diff_dst")],
            outputs=[Tensor(name="diff_weights", dtype=np.float32, shape=any_shape)],
            config=ModelConfig(batching=False),
            strict=False,
        )
        triton.serve()
