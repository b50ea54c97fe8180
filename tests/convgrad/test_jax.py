"""`convgrad.jax` with the real JAX and the real service: outputs and gradients of any order, against `jax.lax`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import convgrad
from tests.live import LiveService

jax = pytest.importorskip("jax", reason="JAX is not installed: scripts/test-frameworks installs it")
jnp = pytest.importorskip("jax.numpy")
cj = pytest.importorskip("convgrad.jax")

LAST = ("NHWC", "HWIO", "NHWC")
CALLS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "1D": ((2, 3, 9), (4, 3, 3), {"window_strides": (2,), "padding": "SAME"}),
    "first": ((2, 4, 7, 6), (6, 2, 3, 2), {"window_strides": (2, 1), "padding": [(1, 2), (0, 1)],
              "feature_group_count": 2}),
    "last": ((2, 7, 6, 4), (3, 2, 2, 6), {"window_strides": (1, 2), "padding": "SAME_LOWER", "rhs_dilation": (2, 1),
             "dimension_numbers": LAST, "feature_group_count": 2}),
    "mixed layouts": ((7, 4, 6, 2), (4, 3, 6, 2), {"window_strides": (1, 1), "padding": "VALID",
                      "dimension_numbers": ("HCWN", "IHOW", "CNHW")}),
    "other weights": ((2, 6, 5, 4), (3, 2, 6, 4), {"window_strides": (1, 1), "padding": "VALID",
                      "dimension_numbers": ("NHWC", "HWOI", "NCHW")}),
    "3D": ((1, 4, 5, 3, 2), (2, 2, 1, 2, 3), {"window_strides": (1, 2, 1), "padding": "SAME",
           "dimension_numbers": ("NDHWC", "DHWIO", "NDHWC")}),
    "input dilation": ((2, 4, 5, 4), (6, 2, 3, 2), {"window_strides": (1, 1), "padding": [(1, 2), (0, 1)],
                       "lhs_dilation": (2, 3), "rhs_dilation": (2, 1), "feature_group_count": 2}),
    "input dilation, last": ((2, 5, 4, 4), (2, 3, 4, 5), {"window_strides": (1, 1), "padding": [(3, 4), (2, -1)],
                             "lhs_dilation": (1, 2), "dimension_numbers": LAST}),
}  # fmt: skip


@pytest.fixture(autouse=True)
def client(service: LiveService) -> Iterator[convgrad.Client]:
    """The client that all calls use."""
    with convgrad.Client(service.url) as client:
        cj.use(client)
        yield client
        cj.use(None)


def integers(shape: tuple[int, ...], dtype: Any = "float32", seed: int = 0) -> Any:
    """Return small integers, whose sums are exact."""
    return jnp.asarray(np.random.default_rng(seed).integers(-3, 4, shape), dtype)


def same(found: Any, right: Any) -> None:
    """Compare dtype, shape and bits."""
    assert (found.dtype, found.shape) == (right.dtype, right.shape)
    np.testing.assert_array_equal(np.asarray(found, np.float64), np.asarray(right, np.float64))


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_outputs_and_gradients_agree_with_jax(name: str, jit: bool) -> None:
    """On integers, whose sums are exact, output and both gradients have the bits of `jax.lax`, compiled or not."""
    src_shape, weights_shape, settings = CALLS[name]
    src, weights = integers(src_shape), integers(weights_shape, seed=1)
    results = []
    for library in (cj, jax.lax):

        def run(src: Any, weights: Any, library: Any = library) -> Any:
            return library.conv_general_dilated(src, weights, **settings)

        def both(src: Any, weights: Any, run: Any = run) -> Any:
            dst, pull = jax.vjp(run, src, weights)
            return dst, *pull(integers(dst.shape, seed=2))

        results.append((jax.jit(both) if jit else both)(src, weights))
    for found, right in zip(*results, strict=True):
        same(found, right)


@pytest.mark.parametrize("name", CALLS)
def test_finite_differences(name: str) -> None:
    """First and second derivatives are those of finite differences, in float64."""
    from jax.test_util import check_grads

    src_shape, weights_shape, settings = CALLS[name]
    with jax.enable_x64(True):
        src, weights = integers(src_shape, "float64"), integers(weights_shape, "float64", seed=1)

        def run(*arrays: Any) -> Any:
            return cj.conv_general_dilated(*arrays, **settings)

        assert run(src, weights).dtype == np.float64
        check_grads(run, (src, weights), order=2, modes=["rev"])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_short_floats(dtype: str) -> None:
    """float16 and bfloat16 give the float32 result, rounded once."""
    src, weights = integers((2, 16, 9, 9), dtype), integers((8, 16, 3, 3), dtype, seed=1)
    exact = jax.lax.conv(src.astype("float32"), weights.astype("float32"), (1, 1), "SAME")
    same(cj.conv(src, weights, (1, 1), "SAME"), exact.astype(dtype))


@pytest.mark.parametrize("transpose_kernel", [False, True])
@pytest.mark.parametrize("padding", ["SAME", "VALID", [(1, 2), (2, 1)]])
@pytest.mark.parametrize("strides", [(1, 1), (2, 3), (4, 2)])
def test_conv_transpose(strides: tuple[int, int], padding: Any, transpose_kernel: bool) -> None:
    """`conv_transpose` agrees with JAX's for every padding and stride, also where the stride exceeds the kernel."""
    src = integers((2, 4, 5, 3))
    weights = integers((3, 2, 6, 3) if transpose_kernel else (3, 2, 3, 6), seed=1)
    given = {"padding": padding, "transpose_kernel": transpose_kernel}
    for dilation in (None, (2, 1)):
        found, right = (
            library.conv_transpose(src, weights, strides, rhs_dilation=dilation, **given) for library in (cj, jax.lax)
        )
        same(found, right)


def test_only_what_is_differentiated_is_computed(service: LiveService) -> None:
    """The gradient for one argument is one call that computes nothing else; for both it is still one call."""
    calls = []

    class Recording(convgrad.Client):
        def run(self, op: str, *args: Any, **more: Any) -> Any:
            calls.append((op, ()))
            return super().run(op, *args, **more)

        def run_outputs(self, op: str, *args: Any, **more: Any) -> Any:
            calls.append((op, tuple(more["outputs"])))
            return super().run_outputs(op, *args, **more)

    src, weights = integers((1, 2, 5)), integers((3, 2, 3), seed=1)
    expected: dict[Any, tuple[str, tuple[str, ...]]] = {
        0: ("ConvolutionBackwardData", ()),
        1: ("ConvolutionBackwardWeights", ()),
        (0, 1): ("ConvolutionBackwardWeights", ("diff_src", "diff_weights")),
    }
    with Recording(service.url) as client:
        for argument, call in expected.items():
            calls.clear()
            jax.grad(lambda s, w: cj.conv(s, w, (1,), "SAME", client=client).sum(), argument)(src, weights)
            assert calls == [("Convolution", ()), call]


def test_the_algorithm_of_a_call_and_of_all(client: convgrad.Client) -> None:
    """A call's algorithm, or else that of `use`, sums it and its gradients."""
    src, weights = (jnp.asarray(np.random.default_rng(n).standard_normal((16, 16, 3, 3)), "float32") for n in (0, 1))

    def gradient(**more: Any) -> Any:
        return jax.grad(lambda w: (cj.conv(src, w, (1, 1), "SAME", **more) ** 2).sum())(weights)

    direct, summed = gradient(), gradient(algorithm="winograd")
    assert not jnp.array_equal(direct, summed)
    np.testing.assert_allclose(direct, summed, rtol=1e-4, atol=1e-2)
    cj.use(client, algorithm="winograd")
    assert jnp.array_equal(gradient(), summed)
    assert jnp.array_equal(gradient(algorithm="direct"), direct)


def test_vmap_and_scan() -> None:
    """A call works inside `vmap` and `scan`, and so do its gradients."""
    many, weights = integers((3, 2, 2, 8)), integers((2, 2, 3), seed=1)

    def loss(library: Any, src: Any, weights: Any) -> Any:
        return (library.conv(src, weights, (1,), "SAME") * 2).sum()

    for batched in (0, None):
        stacked = integers((3, 2, 2, 3), seed=2) if batched == 0 else weights
        found, right = (
            jax.vmap(jax.grad(lambda s, w, lib=library: loss(lib, s, w), 1), (0, batched))(many, stacked)
            for library in (cj, jax.lax)
        )
        same(found, right)

    def scanned(library: Any) -> Any:
        return jax.lax.scan(lambda carry, _: (library.conv(carry, weights, (1,), "SAME"), None), many[0], length=2)[0]

    same(scanned(cj), scanned(jax.lax))


def test_what_is_not_supported_is_named() -> None:
    """Each refusal says what must hold and what was given; wrong shapes are JAX's own errors."""
    src, weights = integers((2, 2, 5)), integers((4, 2, 3))
    wrong: list[tuple[type[Exception], str, Any]] = [
        (convgrad.Unsupported, "lhs is int32: convert it",
         lambda: cj.conv(src.astype("int32"), weights.astype("int32"), (1,), "SAME")),
        (convgrad.Unsupported, "batch_group_count must be 1, but is 2",
         lambda: cj.conv_general_dilated(src, weights, (1,), "SAME", batch_group_count=2)),
        (convgrad.Unsupported, r"at least 0, but is \(-1, 0\) on spatial axis 0",
         lambda: cj.conv_general_dilated(src, weights, (1,), [(-1, 0)])),
        (convgrad.Unsupported, r"\(2,\) needs window_strides of 1",
         lambda: cj.conv_general_dilated(src, weights, (2,), [(0, 0)], lhs_dilation=(2,))),
        (convgrad.Unsupported, "_element_type must be that of lhs, bfloat16, but is float32",
         lambda: cj.conv(src.astype("bfloat16"), weights.astype("bfloat16"), (1,), "SAME", None, jnp.float32)),
        (ValueError, "feature dimension", lambda: cj.conv(src, integers((4, 3, 3)), (1,), "SAME")),
    ]  # fmt: skip
    for kind, message, call in wrong:
        with pytest.raises(kind, match=message):
            call()
