"""`torch.compile` and `torch.export` of the layers and functions of `convgrad.torch`: one graph, the same bits."""

from __future__ import annotations

import gc
import shutil
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from convgrad import Client
from tests.convgrad.torch_layers import EVERY, Recording, made, results
from tests.live import LiveService

torch = pytest.importorskip("torch", reason="PyTorch is not installed: scripts/test-frameworks installs it")
ct = pytest.importorskip("convgrad.torch")

pytestmark = [
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
]

BACKENDS = [
    "eager",
    "aot_eager",
    pytest.param("inductor", marks=pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")),
]


@pytest.fixture(autouse=True)
def client(service: LiveService) -> Iterator[Recording]:
    """The client that all layers use; nothing is compiled yet."""
    torch._dynamo.reset()
    with Recording(service.url) as client:
        ct.use(client)
        yield client
        ct.use(None)
    torch._dynamo.reset()


def whole(function: Any, backend: Any = "aot_eager", **more: Any) -> Any:
    """Compile a function or layer; raises an error where it does not become one graph."""
    return torch.compile(function, fullgraph=True, backend=backend, **more)


def assert_same(found: Any, right: Any) -> None:
    """All tensors have the same bits and strides."""
    for one, other in zip(found, right, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
        assert one.stride() == other.stride()


@EVERY
def test_layers(name: str, rank: int) -> None:
    """Output and gradients of a compiled layer have the bits, and the strides, of those of the layer."""
    _, ours, src = made(name, rank)
    assert_same(results(whole(ours), src), results(ours, src))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["all", "all transposed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes_and_memory_formats(backend: str, name: str, dtype: Any, client: Recording) -> None:
    """Every kind of compiler gives the same in both memory formats, and what is channels-last is sent as it is."""
    _, ours, src = made(name, 2, dtype)
    last = src.detach().to(memory_format=torch.channels_last).requires_grad_()
    compiled = whole(ours, backend)
    assert_same(results(compiled, src), results(ours, src))
    client.calls.clear()
    found = results(compiled, last)
    assert {layout for _, layout, _ in client.calls} == {"NXC"}
    assert_same(found, results(ours, last))


@pytest.mark.parametrize("backend", BACKENDS)
def test_outputs_by_pytorch_have_the_strides_that_were_announced(backend: str) -> None:
    """PyTorch chooses channels-last outputs for channels-last weights; what follows in the graph reads them rightly."""
    theirs, ours, src = made("all", 2, forward="torch")
    ours.to(memory_format=torch.channels_last)
    assert not ours(src).is_contiguous()
    compiled = whole(lambda src: (ours(src) * 2).flatten(1), backend)
    assert torch.equal(compiled(src), (theirs(src) * 2).flatten(1))


@pytest.mark.parametrize("name", ["all", "all transposed", "same"])
def test_one_graph_for_all_sizes(name: str) -> None:
    """With dynamic shapes a layer is compiled once."""
    counter = pytest.importorskip("torch._dynamo.testing").CompileCounterWithBackend("aot_eager")
    _, ours, _ = made(name, 2)
    compiled = whole(ours, counter, dynamic=True)
    for n, height, width in ((2, 6, 5), (3, 9, 12), (5, 8, 7)):
        src = torch.randint(-4, 5, (n, 4, height, width)).float().requires_grad_()
        assert_same(results(compiled, src), results(ours, src))
    assert counter.frame_count == 1


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_functions(backend: str, dynamic: bool) -> None:
    """Every function can be compiled, with sizes as arguments too; an input without a batch stays without one."""
    draw = torch.Generator().manual_seed(3)
    src, weights, diff_dst, bias = (
        torch.randint(-4, 5, shape, generator=draw).float()
        for shape in ((2, 4, 8, 6), (6, 2, 3, 2), (2, 6, 4, 4), (4,))
    )
    more: dict[str, Any] = {"stride": 2, "padding": (1, 1), "groups": 2}

    def run(src: Any, weights: Any, diff_dst: Any, bias: Any) -> list[Any]:
        return [
            ct.conv(src[0], weights, **more),
            ct.conv(src, weights, padding="same", groups=2),
            ct.conv_input(src.shape, weights, diff_dst * 2, **more),
            ct.conv_weight(src * 2, weights.shape, diff_dst, **more),
            ct.conv_transpose(diff_dst, weights, bias, output_padding=(1, 0), **more),
            ct.conv_transpose_input(diff_dst.shape, weights, src, output_padding=(1, 0), **more),
            ct.conv_transpose_weight(diff_dst, weights.shape, src, output_padding=(1, 0), **more),
            ct.bias_add(src, bias),
            ct.bias_grad(src.to(memory_format=torch.channels_last)),
        ]

    given = (src, weights, diff_dst, bias)
    assert_same(whole(run, backend, dynamic=dynamic)(*given), run(*given))


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_operators_are_what_pytorch_demands(form: Any) -> None:
    """`opcheck` finds schemas, shapes and strides without data, and gradients to be right."""
    draw = torch.Generator().manual_seed(4)
    src, weights, diff_dst, bias = (
        torch.randint(-4, 5, shape, generator=draw).float()
        for shape in ((2, 4, 7, 6), (6, 2, 3, 2), (2, 6, 4, 4), (6,))
    )
    src = src.to(memory_format=form)
    layer, transposed = [0, 2, 2, 2, 1, 1, 1, 1, 1, 1, 0, 0], [1, 2, 2, 2, 1, 1, 1, 1, 1, 1, 0, 1]
    key, ops = ct.Backend().key, torch.ops.convgrad
    calls = [
        (ops.conv, (src, weights, bias, layer, key)),
        (ops.conv, (diff_dst, weights, None, transposed, key)),
        (ops.conv, (src, weights, None, layer, ct.Backend(forward="torch").key)),
        (ops.conv_gradients, (src, weights, diff_dst, [True, True, True], layer, key)),
        (ops.conv_gradients, (src, weights, diff_dst, [False, True, False], layer, key)),
        (ops.bias_add, (diff_dst.to(memory_format=form), bias, key)),
        (ops.bias_grad, (src, key)),
    ]
    for operator, given in calls:
        torch.library.opcheck(getattr(ops, f"_{operator.__name__}").default, given)
        needing = [each.clone().requires_grad_() if isinstance(each, torch.Tensor) else each for each in given]
        torch.library.opcheck(operator.default, needing)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_who_computes_is_chosen_at_each_call(backend: str, service: LiveService, client: Recording) -> None:
    """A compiled layer's client and algorithm are its backend's, or else those of `use` when it is called."""
    layer = ct.Conv2d(16, 16, 3, padding=1, backend=ct.Backend(algorithm="winograd"))
    compiled, src = whole(layer, backend), torch.randn(2, 16, 6, 5)
    with Recording(service.url) as first, Recording(service.url) as second:
        everyone = (client, first, second)

        def asked(each: Any) -> list[list[str]]:
            for one in everyone:
                one.algorithms.clear()
            each(src).sum().backward()
            return [one.algorithms for one in everyone]

        assert asked(compiled) == [["winograd"] * 2, [], []]
        layer.backend = ct.Backend(first, algorithm="auto")
        assert asked(compiled) == [[], ["auto"] * 2, []]
        layer.backend = ct.Backend(second)
        assert asked(compiled) == [[], [], ["direct"] * 2]
        layer.backend = ct.Backend()
        ct.use(first, algorithm="auto")
        assert asked(compiled) == [[], ["auto"] * 2, []]
        ct.use(client)
        assert asked(compiled) == [["direct"] * 2, [], []]

        def function(src: Any, chosen: Any = second) -> Any:
            return ct.conv(src, layer.weight, backend=ct.Backend(chosen, algorithm="auto"))

        compiled = whole(function, backend)
        assert asked(compiled) == [[], [], ["auto"] * 2]
        assert asked(lambda src: compiled(src, first)) == [[], ["auto"] * 2, []]


def test_a_backward_pass_after_the_layer_is_gone(service: LiveService) -> None:
    """What is compiled keeps its client; that of other layers ends with them."""

    def output(wrap: Any) -> tuple[Any, str, weakref.ref[Client]]:
        backend = ct.Backend(Client(service.url))
        dst = wrap(ct.Conv2d(4, 6, 3, backend=backend))(torch.randn(2, 4, 6, 5))
        return dst, backend.key, weakref.ref(backend.client)

    for wrap in (whole, lambda layer: layer):
        dst, key, client = output(wrap)
        gc.collect()
        dst.sum().backward()
        if (kept := client()) is not None:
            kept.close()
        del dst, kept
        gc.collect()
    with pytest.raises(RuntimeError, match="the client of this layer is not in this process"):
        ct.Backend.of(key)


def test_an_exported_layer_learns() -> None:
    """`torch.export` keeps a layer as one operator, which has gradients."""
    _, ours, src = made("all", 2)
    program = torch.export.export(ours, (src.detach(),))
    assert [str(node.target) for node in program.graph.nodes if node.op == "call_function"] == ["convgrad.conv.default"]
    exported = program.module()
    assert_same(results(exported, src), results(ours, src))


def test_second_derivatives() -> None:
    """They are right where the compiler lets through autograd, and an error where it does not."""
    src = torch.randint(-4, 5, (2, 4, 6, 5)).double().requires_grad_()
    weights = torch.randint(-4, 5, (6, 4, 3, 2)).double()

    def second(function: Any) -> Any:
        (gradient,) = torch.autograd.grad(function(src).pow(3).sum(), src, create_graph=True)
        return torch.autograd.grad(gradient.square().sum() + function(src).square().sum(), src)

    def run(src: Any) -> Any:
        return ct.conv(src, weights)

    right = second(lambda src: torch.nn.functional.conv2d(src, weights))
    assert torch.equal(second(whole(run, "eager"))[0], right[0])
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        second(whole(run, "aot_eager"))
