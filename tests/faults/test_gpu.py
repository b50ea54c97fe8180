"""A worker that had an error of CUDA, after which no call of its process works, is replaced."""

from __future__ import annotations

import os
import re
from pathlib import Path

import httpx
import numpy as np
import pytest

import convgrad
from tests.kernels.gpu.running import device, needs_triton
from tests.live import running_service

pytestmark = needs_triton

# Python imports a module of this name first. It fails a launch of a worker, as CUDA does, while there is a file.
HOOK = """
import os
from kernels.gpu.unit import GpuKernel

right = GpuKernel.run

def run(*arguments):
    import torch
    from kernels.gpu.launches import Launch

    def launch(*tensors):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    if os.path.exists(os.environ["FAULT"]):
        Launch.__call__ = launch
    return right(*arguments)

GpuKernel.run = run
"""


def test_a_worker_that_had_an_error_of_cuda_is_replaced(tmp_path: Path) -> None:
    """The call fails, the log names the error, and a new worker computes the next call."""
    device()
    (tmp_path / "sitecustomize.py").write_text(HOOK, encoding="utf-8")
    fault = tmp_path / "fault"
    modules = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    inputs = {"src": np.ones((1, 2, 3, 3), np.float32), "bias": np.ones(2, np.float32)}
    with (
        running_service(CONVGRAD_DEVICE="cuda", PYTHONPATH=modules, FAULT=str(fault)) as service,
        convgrad.Client(service.url) as client,
    ):
        assert (client.run("BiasAdd", inputs, {"data_format": "NCX"}) == 2).all()
        fault.touch()
        with pytest.raises(convgrad.InternalError):
            client.run("BiasAdd", inputs, {"data_format": "NCX"})
        fault.unlink()
        assert (client.run("BiasAdd", inputs, {"data_format": "NCX"}) == 2).all()
        assert httpx.get(f"{service.url}/readyz").json()["workers"] == {"ready": 1, "wanted": 1}
    log = "".join(service.log)
    assert "AcceleratorError: CUDA error: an illegal memory access was encountered" in log
    failed, ended = (re.findall(how, log) for how in (r"failed on worker (\d+)", r"worker (\d+) exited with status 1"))
    assert failed == ended
    assert len(failed) == 1
