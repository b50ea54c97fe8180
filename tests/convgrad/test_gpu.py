"""Clients and layers that compute on a GPU: in Triton's interpreter, or on one (scripts/test-gpu)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import pytest

import convgrad
from tests.convgrad.torch_layers import made, results
from tests.kernels.gpu.running import INTERPRETED, device, needs_triton
from tests.live import running_service

pytestmark = needs_triton

PLAIN = {
    "strides": [1, 1], "pads_begin": [0, 0], "pads_end": [0, 0], "dilations": [1, 1], "data_format": "NCX",
    "weights_format": "OIX",
}  # fmt: skip


@pytest.fixture(name="client")
def client_of_gpu() -> Iterator[convgrad.Client]:
    """A client that computes on the GPU, or in the interpreter, which layers use too."""
    device()
    from convgrad import torch as layers

    with convgrad.local(device="cuda") as client:
        layers.use(client)
        yield client
        layers.use(None)


def gradients(xp: Any, client: convgrad.Client, src: Any, diff_dst: Any) -> Any:
    """Compute all gradients of a layer."""
    weights = xp(np.random.default_rng(1).integers(-3, 4, (6, 4, 3, 3)).astype(np.float32))
    inputs = {"src": src, "diff_dst": diff_dst, "weights": weights, "weights_shape": [6, 4, 3, 3]}
    attributes = {"strides": [2, 1], "pads_begin": [1, 0], "pads_end": [1, 2], "dilations": [1, 1], "groups": 1,
                  "data_format": "NCX", "weights_format": "OIX"}  # fmt: skip
    names = ("diff_weights", "diff_src", "diff_bias")
    return client.run_outputs("ConvolutionBackwardWeights", inputs, attributes, outputs=names)


def test_arrays_and_tensors(client: convgrad.Client) -> None:
    """Arrays give arrays and tensors on the GPU tensors there, with the bits that the CPU computes."""
    import torch

    rng = np.random.default_rng(0)
    src, diff_dst = (rng.integers(-9, 10, shape).astype(np.float32) for shape in ((2, 4, 7, 6), (2, 6, 4, 6)))
    with convgrad.local() as cpu:
        right = gradients(np.array, cpu, src, diff_dst)
    arrays = gradients(np.array, client, src, diff_dst)

    def there(array: Any) -> Any:
        return torch.from_numpy(array).to(device())

    tensors = gradients(there, client, there(src), there(diff_dst))
    for name, expected in right.items():
        assert isinstance(tensors[name], torch.Tensor)
        assert tensors[name].device.type == device().type
        for found in (arrays[name], tensors[name].cpu().numpy()):
            assert found.dtype == expected.dtype
            assert np.array_equal(found, expected)


def test_bfloat16_arrays_are_bfloat16(client: convgrad.Client) -> None:
    """An array of bfloat16 comes back as one."""
    src, bias = np.ones((1, 2, 3, 3), ml_dtypes.bfloat16), np.full(2, 2, ml_dtypes.bfloat16)
    found = client.run("BiasAdd", {"src": src, "bias": bias}, {"data_format": "NCX"})
    assert found.dtype == ml_dtypes.bfloat16
    assert (found == 3).all()


@pytest.mark.parametrize("name", ["all", "all transposed"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers(client: convgrad.Client, name: str, dtype: str) -> None:
    """Output and gradients of layers have the bits of PyTorch in float64, rounded once."""
    import torch

    kind = getattr(torch, dtype)
    _, ours, src = made(name, 2, kind)
    theirs, _, _ = made(name, 2, torch.float64)
    right = results(theirs, src.detach().double().requires_grad_())
    found = results(ours.to(device()), src.detach().to(device()).requires_grad_())
    for each, expected in zip(found, right, strict=True):
        assert each.device.type == device().type
        assert torch.equal(each.cpu(), expected.to(kind))


@pytest.mark.parametrize("fast", [False, True])
def test_verify_takes_tensors_of_the_gpu(client: convgrad.Client, fast: bool) -> None:
    """A result on the GPU passes, and one with a wrong element does not, also by projections."""
    import torch

    src, diff_dst = (torch.ones((4, 128, 12, 12), device=device()) for _ in range(2))
    weights = torch.ones((128, 128, 1, 1), device=device())
    for op, inputs in (
        ("Convolution", {"src": src, "weights": weights}),
        ("ConvolutionBackwardWeights", {"src": src, "diff_dst": diff_dst, "weights_shape": [128, 128, 1, 1]}),
    ):
        found = client.run(op, inputs, PLAIN)
        report = client.verify(op, inputs, found, PLAIN, fast=fast)
        assert report.passed
        assert ("projections" in report.data) == fast
        found[0, 5] += 1
        assert not client.verify(op, inputs, found, PLAIN, fast=fast).passed


def test_tensors_on_two_devices_are_refused(client: convgrad.Client) -> None:
    """A call whose tensors are on two devices names both."""
    import torch

    src, bias = torch.ones((1, 2, 3, 3), device=device()), torch.ones(2, device="meta")
    with pytest.raises(convgrad.InvalidParams, match=f"src is on {device().type}.*, bias is on meta"):
        client.run("BiasAdd", {"src": src, "bias": bias}, {"data_format": "NCX"})


def test_winograd_is_refused(client: convgrad.Client) -> None:
    """Winograd's algorithm is not there on a GPU."""
    src, weights = np.ones((1, 64, 9, 9), np.float32), np.ones((64, 64, 3, 3), np.float32)
    with pytest.raises(convgrad.InvalidParams, match="algorithm must be direct or auto on a GPU, but is winograd"):
        client.run("Convolution", {"src": src, "weights": weights}, PLAIN, algorithm="winograd")


def test_a_service_names_its_gpu_and_computes_there() -> None:
    """With CONVGRAD_DEVICE=cuda a service has one worker, and names the GPU; the reference has the CPU's bits."""
    device()
    rng = np.random.default_rng(3)
    inputs = {"src": rng.standard_normal((2, 3, 5, 5)), "weights": rng.standard_normal((4, 3, 1, 1))}
    with running_service(CONVGRAD_DEVICE="cuda") as service, convgrad.Client(service.url) as client:
        found = client.run("Convolution", inputs, PLAIN, reference=True)
        page = httpx.get(f"{service.url}/readyz").json()
    with convgrad.local() as cpu:
        assert np.array_equal(found, cpu.run("Convolution", inputs, PLAIN, reference=True))
    assert page["device"]
    assert page["workers"] == {"ready": 1, "wanted": 1}


def test_copies_that_do_not_fit_are_too_large(client: convgrad.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays and tensors whose copies the GPU's memory does not hold are an error of the client's, not PyTorch's."""
    import torch

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    array = np.ones((1, 2, 3, 3), np.float32)
    tensor = torch.from_numpy(array).to(device()).transpose(2, 3)
    for name, src, bias in (("to", array, array[0, :, 0, 0]), ("contiguous", tensor, tensor[0, :, 0, 0])):
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, name, fail)
            with pytest.raises(convgrad.TooLarge, match="bytes of the GPU's memory"):
                client.run("BiasAdd", {"src": src, "bias": bias}, {"data_format": "NCX"})
    assert (client.run("BiasAdd", {"src": array, "bias": array[0, :, 0, 0]}, {"data_format": "NCX"}) == 2).all()


@pytest.mark.skipif(INTERPRETED, reason="needs the memory of a GPU")
def test_out_of_memory_is_an_error_that_names_sizes(client: convgrad.Client) -> None:
    """A call that the GPU's memory does not hold is too large, with both numbers, and the next one is computed."""
    import torch

    src = torch.ones((1, 1, 4, 4), device=device())
    free = torch.cuda.mem_get_info()[0]
    channels = free // 4 // 16 + 1
    weights = torch.ones((1, 1, 1, 1), device=device()).expand(channels, 1, 1, 1)
    with pytest.raises(convgrad.TooLarge) as raised:
        client.run("Convolution", {"src": src, "weights": weights}, PLAIN)
    assert raised.value.data["value"] > raised.value.data["limit"]
    assert client.run("Convolution", {"src": src, "weights": weights[:2]}, PLAIN).shape == (1, 2, 4, 4)
