"""`convgrad.torch` with the real PyTorch and the real service: outputs, gradients, and gradients of gradients."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import convgrad
from convgrad._tensors import part
from tests.convgrad.torch_layers import EVERY, Recording, made, results
from tests.live import LiveService

torch = pytest.importorskip("torch", reason="PyTorch is not installed: scripts/test-frameworks installs it")
ct = pytest.importorskip("convgrad.torch")

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")


@pytest.fixture(autouse=True)
def client(service: LiveService) -> Iterator[Recording]:
    """The client that all layers use."""
    with Recording(service.url) as client:
        ct.use(client)
        yield client
        ct.use(None)


def taking_parameters(layer: Any) -> Any:
    """Return a layer as a function of its input and parameters."""
    names = [name for name, _ in layer.named_parameters()]

    def run(src: Any, *parameters: Any) -> Any:
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (src,))

    return run


@pytest.mark.parametrize("forward", ["service", "torch"])
@EVERY
def test_layers_agree_with_pytorch(name: str, rank: int, forward: str) -> None:
    """On integers, whose sums are exact, output and all gradients have the bits of PyTorch's own layer."""
    theirs, ours, src = made(name, rank, forward=forward)
    for found, right in zip(results(ours, src), results(theirs, src), strict=True):
        assert found.dtype == right.dtype
        assert torch.equal(found, right)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["all", "all transposed"])
def test_short_floats_are_rounded_once(name: str, dtype: Any) -> None:
    """float16 and bfloat16 give what PyTorch gives in float64, rounded to them."""
    _, ours, src = made(name, 2, dtype)
    theirs, _, _ = made(name, 2, torch.float64)
    for found, right in zip(results(ours, src), results(theirs, src.detach().double().requires_grad_()), strict=True):
        assert found.dtype == dtype
        assert torch.equal(found, right.to(dtype))


@EVERY
def test_gradcheck_and_gradgradcheck(name: str, rank: int) -> None:
    """The gradients, and those of the gradients, are those of finite differences, in float64."""
    _, ours, src = made(name, rank, torch.float64)
    function, inputs = taking_parameters(ours), (src, *ours.parameters())
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


@EVERY
def test_gradients_of_all_gradients_at_once(name: str, rank: int) -> None:
    """A loss that has every gradient in it has PyTorch's derivatives: `gradgradcheck` looks at one after the other."""
    theirs, ours, src = made(name, rank, torch.float64)
    results = []
    for layer in (ours, theirs):
        dst = layer(src)
        diff_dst = (torch.arange(dst.numel(), dtype=torch.float64) % 5 - 2).reshape(dst.shape).requires_grad_()
        gradients = torch.autograd.grad(dst, [src, *layer.parameters()], diff_dst, create_graph=True)
        loss = sum(gradient.pow(3).sum() for gradient in gradients)
        results.append(torch.autograd.grad(loss, [src, layer.weight, diff_dst]))
    for found, right in zip(*results, strict=True):
        assert torch.equal(found, right)


def test_the_functions_of_the_other_operations() -> None:
    """Gradients as functions agree with `torch.nn.grad`, biases with sums, and all are differentiable twice."""
    draw = torch.Generator().manual_seed(3)
    src, weights, diff_dst = (
        torch.randint(-4, 5, shape, generator=draw).double().requires_grad_()
        for shape in ((2, 4, 8, 6), (6, 2, 3, 2), (2, 6, 4, 4))
    )
    more, extra = {"stride": 2, "padding": (1, 1), "groups": 2}, {"output_padding": (1, 0)}
    grad = torch.nn.grad
    assert torch.equal(
        ct.conv_input(src.shape, weights, diff_dst, **more), grad.conv2d_input(src.shape, weights, diff_dst, **more)
    )
    assert torch.equal(
        ct.conv_weight(src, weights.shape, diff_dst, **more), grad.conv2d_weight(src, weights.shape, diff_dst, **more)
    )
    # A transposed convolution is the gradient of a convolution for its input, with the two tensors swapped.
    swapped = ct.conv_transpose_weight(diff_dst, weights.shape, src, **extra, **more)
    right = torch.nn.functional.conv_transpose2d(diff_dst, weights, **extra, **more)
    assert right.shape == src.shape
    assert torch.equal(swapped, torch.autograd.grad(right, weights, src)[0])
    transposed = ct.conv_transpose_input(diff_dst.shape, weights, src, **extra, **more)
    assert torch.equal(transposed, torch.nn.functional.conv2d(src, weights, **more))
    bias = torch.arange(4.0, dtype=torch.float64).requires_grad_()
    assert torch.equal(ct.bias_add(src, bias), src + bias[:, None, None])
    assert torch.equal(ct.bias_grad(src), src.sum((0, 2, 3)))

    functions = [
        (lambda w, g: ct.conv_input(src.shape, w, g, **more), (weights, diff_dst)),
        (lambda s, g: ct.conv_weight(s, weights.shape, g, **more), (src, diff_dst)),
        (lambda w, g: ct.conv_transpose_input(diff_dst.shape, w, g, **extra, **more), (weights, src)),
        (lambda s, g: ct.conv_transpose_weight(s, weights.shape, g, **extra, **more), (diff_dst, src)),
        (ct.bias_add, (src, bias)),
        (ct.bias_grad, (src,)),
    ]
    for function, inputs in functions:
        assert torch.autograd.gradcheck(function, inputs, fast_mode=True)
        assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("name", ["all", "all transposed"])
def test_channels_last(name: str, rank: int, client: Recording) -> None:
    """Channels-last tensors are sent as NXC, results are channels-last too, and the values are the same."""
    layer, ours, src = made(name, rank)
    form = torch.channels_last if rank == 2 else torch.channels_last_3d
    last = src.detach().to(memory_format=form).requires_grad_()
    right = results(layer, src)
    client.calls.clear()
    found = results(ours, last)
    assert {layout for _, layout, _ in client.calls} == {"NXC"}
    assert all(torch.equal(one, other) for one, other in zip(found, right, strict=True))
    assert found[0].is_contiguous(memory_format=form)
    assert found[1].is_contiguous(memory_format=form)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_are_sent_from_their_own_memory(dtype: Any) -> None:
    """What goes to the socket is the tensor's memory, in either layout, bfloat16 too: no copy is made."""
    plain = torch.zeros(2, 4, 5, 3, dtype=dtype, requires_grad=True)
    for tensor in (plain, plain.detach().to(memory_format=torch.channels_last).movedim(1, -1)):
        elements = part(tensor).elements
        assert elements is not None
        (sent,) = elements()
        assert np.frombuffer(sent, np.uint8).ctypes.data == tensor.data_ptr()
        assert len(sent) == tensor.nbytes


def test_only_what_is_needed_is_computed(client: Recording) -> None:
    """A backward pass is one call, for exactly the gradients that something needs."""
    _, ours, src = made("all", 2)
    dst = ours(src)
    every = ("diff_src", "diff_weights", "diff_bias")
    parts = {
        (src, ours.weight, ours.bias): ("ConvolutionBackwardWeights", "NCX", every),
        (ours.weight, ours.bias): ("ConvolutionBackwardWeights", "NCX", every[1:]),
        (src, ours.bias): ("ConvolutionBackwardWeights", "NCX", (every[0], every[2])),
        (ours.weight,): ("ConvolutionBackwardWeights", "NCX", ()),
        (src,): ("ConvolutionBackwardData", "NCX", ()),
        (ours.bias,): ("BiasAddBackward", "NCX", ()),
    }
    for frozen in (src, ours.weight, ours.bias):
        frozen.requires_grad_(False)
    for wanted, expected in parts.items():
        for each in wanted:
            each.requires_grad_()
        dst = ours(src)
        client.calls.clear()
        dst.sum().backward()
        assert client.calls == [expected]
        for each in wanted:
            each.requires_grad_(False)
    client.calls.clear()
    ct.Conv2d.of(torch.nn.Conv2d(4, 6, 3), ct.Backend(forward="torch"))(src)
    assert not client.calls


def test_replace() -> None:
    """Every layer of a model is replaced at any depth; parameters, names, hooks and shared layers stay."""
    shared = torch.nn.Conv1d(3, 3, 1)
    model = torch.nn.Sequential(
        torch.nn.Conv1d(2, 3, 3),
        torch.nn.Sequential(shared, torch.nn.ReLU(), shared),
        torch.nn.ConvTranspose1d(3, 2, 2),
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before, seen = {**model.state_dict()}, []
    model[0].register_forward_hook(lambda *_: seen.append(1))
    src = torch.randn(2, 2, 9)
    right = model(src)
    assert ct.replace(model) is model
    assert [type(each).__module__ for each in (model[0], model[1][0], model[2])] == ["convgrad.torch._modules"] * 3
    assert model[1][0] is model[1][2]
    assert {name: value.data_ptr() for name, value in model.state_dict().items()} == {
        name: value.data_ptr() for name, value in before.items()
    }
    torch.testing.assert_close(model(src), right)
    assert len(seen) == 2
    model(src).square().sum().backward()
    optimizer.step()
    assert not torch.allclose(model(src), right)
    alone = torch.nn.Conv1d(2, 3, 3)
    assert isinstance(ct.replace(alone), ct.Conv1d)
    assert ct.replace(model) is model


def test_subclasses_stay() -> None:
    """What is not a plain layer of PyTorch is left alone, and a warning names it."""
    model = torch.nn.Sequential(torch.nn.utils.parametrizations.weight_norm(torch.nn.Conv1d(2, 3, 3)))
    with pytest.warns(UserWarning, match="0 stays as it is: ParametrizedConv1d is a subclass"):
        ct.replace(model)
    with pytest.raises(TypeError, match=r"needs a torch.nn.Conv2d, not Conv1d"):
        ct.Conv2d.of(torch.nn.Conv1d(2, 3, 3))
    normed = torch.nn.utils.parametrizations.weight_norm(ct.Conv1d(2, 3, 3))
    normed(torch.randn(1, 2, 5)).sum().backward()
    assert normed.parametrizations.weight.original0.grad is not None


def test_copies_and_files(client: Recording) -> None:
    """A layer can be copied with its client, and saved and loaded without it."""
    layer = ct.Conv2d(2, 3, 3, backend=ct.Backend(client, reference=True, algorithm="auto"))
    assert copy.deepcopy(layer).backend.client is client
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert loaded.backend == ct.Backend(None, reference=True, algorithm="auto")
    src = torch.randn(1, 2, 5, 5)
    assert torch.equal(loaded(src), layer(src))


def test_shapes_and_autocast() -> None:
    """An input without a batch gives an output without one; `output_size` chooses among the possible sizes.

    Under autocast a layer computes in the short type, as PyTorch's does, and its gradients are f32.
    """
    layer = torch.nn.ConvTranspose2d(4, 6, 3, stride=2)
    single, one = ct.ConvTranspose2d.of(layer), torch.randn(4, 5, 3)
    torch.testing.assert_close(single(one), layer(one))
    torch.testing.assert_close(single(one, output_size=[12, 8]), layer(one, output_size=[12, 8]))
    _, ours, src = made("all", 2)
    with torch.autocast("cpu", torch.bfloat16):
        dst = ours(src)
    assert dst.dtype == torch.bfloat16
    dst.float().sum().backward()
    assert ours.weight.grad.dtype == torch.float32


def test_errors_name_what_is_wrong() -> None:
    """Dtypes, paddings and shapes that are not supported are named, with what to do."""
    src, weights = torch.zeros(1, 2, 5), torch.zeros(3, 2, 3)
    wide, long = src.to(torch.complex64), torch.zeros(2, 3, 3)
    wrong: list[tuple[type[Exception], str, Any]] = [
        (convgrad.Unsupported, "tensor is torch.complex64: convert it", lambda: ct.conv(wide, wide)),
        (convgrad.InvalidParams, r'is "same" with stride \(2,\)',
         lambda: ct.conv(src, weights, stride=2, padding="same")),
        (convgrad.InvalidParams, "stride must have 1 integer", lambda: ct.conv(src, weights, stride=(2, 2))),
        (convgrad.Unsupported, "output_padding must be less than stride",
         lambda: ct.conv_transpose(src, long, dilation=4, output_padding=3)),
        (convgrad.InvalidParams, "must be f32 like src, but is f16", lambda: ct.conv(src, weights.half())),
        (convgrad.InvalidParams, "channels", lambda: ct.conv(src, torch.zeros(3, 4, 3))),
        (ValueError, "forward must be", lambda: ct.Backend(forward="gpu")),
        (ValueError, "algorithm must be", lambda: ct.Backend(algorithm="fft")),
    ]  # fmt: skip
    for kind, message, call in wrong:
        with pytest.raises(kind, match=message):
            call()


def test_the_algorithm_of_a_layer_and_of_all(client: Recording) -> None:
    """The algorithm is a backend's, or else that of `use`, for outputs and gradients."""
    layer = torch.nn.Conv2d(16, 16, 3, padding=1)
    src = torch.randn(2, 16, 6, 5, requires_grad=True)

    def gradient(algorithm: Any = None) -> Any:
        client.algorithms.clear()
        ours = ct.Conv2d.of(layer, ct.Backend(algorithm=algorithm))
        return torch.autograd.grad(ours(src).square().sum(), [ours.weight, src])[0]

    direct = gradient()
    assert client.algorithms == ["direct", "direct"]
    summed = gradient("winograd")
    assert client.algorithms == ["winograd", "winograd"]
    assert not torch.equal(summed, direct)
    torch.testing.assert_close(summed, direct)
    ct.use(client, algorithm="winograd")
    assert torch.equal(gradient(), summed)
    assert torch.equal(gradient("direct"), direct)
    gradient("auto")
    assert client.algorithms == ["auto", "auto"]
    few = ct.Conv2d(4, 16, 3)
    with pytest.raises(convgrad.InvalidParams, match="at least 16 src channels of a group; there are 4"):
        few(torch.randn(1, 4, 5, 5))


def test_the_default_client_reads_the_environment(service: LiveService, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `use` the layers call the service at CONVGRAD_URL; bfloat16 results keep their bits."""
    ct.use(None)
    monkeypatch.setenv("CONVGRAD_URL", service.url)
    values = torch.tensor([[[1.0, 2.0]]], dtype=torch.bfloat16)
    found = ct.conv(values, torch.full((1, 1, 1), 3.0, dtype=torch.bfloat16))
    assert found.tolist() == [[[3.0, 6.0]]]
    assert found.view(torch.uint16).numpy().view(ml_dtypes.bfloat16).tolist() == [[[3.0, 6.0]]]
