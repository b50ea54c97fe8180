"""The table of names: what a row says is the same thing has the same result in PyTorch, JAX, ONNX and the service.

A check has the name of its row's first or, for operations, last cell. Small integers make every result exact.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import convgrad
from schemas.frameworks import NAMES, OPERATIONS, Here, dtype_here, format_here, name_here, operation_here
from schemas.rows import DATA_FORMATS, WEIGHTS_FORMATS
from tests.live import LiveService

Array = npt.NDArray[Any]
Compute = Callable[[Array, Array], Any]

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "names.md").read_text(encoding="utf-8")
SRC, WEIGHTS, GROUPED, TRANSPOSED = (2, 4, 7, 6), (6, 4, 3, 2), (6, 2, 3, 2), (4, 6, 3, 2)
PLAIN: dict[str, Any] = {
    "strides": (1, 1),
    "dilations": (1, 1),
    "pads_begin": (0, 0),
    "pads_end": (0, 0),
    "data_format": "NCX",
    "weights_format": "OIX",
}
FIRST, LAST = ("NCHW", "OIHW", "NCHW"), ("NHWC", "HWIO", "NHWC")


@pytest.fixture(scope="module")
def client(service: LiveService) -> Iterator[convgrad.Client]:
    """A client of the service."""
    with convgrad.Client(service.url) as client:
        yield client


def integers(*shape: int) -> Array:
    """Return small integers."""
    return np.random.default_rng(shape).integers(-3, 4, shape).astype(np.float32)


def rows(title: str) -> list[list[str]]:
    """Return the cells of the table under a heading."""
    (section,) = (part for part in PAGE.split("\n## ") if part.startswith(title))
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def in_torch(function: str, src: Array, weights: Array, **named: Any) -> Array:
    """Call a function of `torch.nn.functional`."""
    torch = pytest.importorskip("torch")
    found: Array = getattr(torch.nn.functional, function)(torch.tensor(src), torch.tensor(weights), **named).numpy()
    return found


def in_jax(function: str, src: Array, weights: Array, **named: Any) -> Array:
    """Call a function of `jax.lax`."""
    lax = pytest.importorskip("jax.lax")
    return np.asarray(getattr(lax, function)(src, weights, **named))


def in_onnx(kind: str, src: Array, weights: Array, **attributes: Any) -> Array:
    """Compute a node by ONNX's reference evaluator."""
    helper, reference = pytest.importorskip("onnx.helper"), pytest.importorskip("onnx.reference")
    node = helper.make_node(kind, ["X", "W"], ["Y"], **attributes)
    (found,) = reference.ReferenceEvaluator(node).run(None, {"X": src, "W": weights})
    return np.asarray(found)


# The rows of attributes: shape of the weights, whether transposed, and what each package is given.
ATTRIBUTES: dict[str, tuple[tuple[int, ...], dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "stride": (WEIGHTS, {"stride": (2, 3)}, {"window_strides": (2, 3)}, {"strides": [2, 3]}, {"strides": (2, 3)}),
    "dilation, 1 is dense": (
        WEIGHTS, {"dilation": (2, 1)}, {"rhs_dilation": (2, 1)}, {"dilations": [2, 1]}, {"dilations": (2, 1)},
    ),
    "groups": (GROUPED, {"groups": 2}, {"feature_group_count": 2}, {"group": 2}, {"groups": 2}),
    "the same zeros on both sides": (
        WEIGHTS, {"padding": 1}, {"padding": [(1, 1), (1, 1)]}, {"pads": [1, 1, 1, 1]},
        {"pads_begin": (1, 1), "pads_end": (1, 1)},
    ),
    "different zeros": (
        WEIGHTS, {}, {"padding": [(1, 2), (0, 3)]}, {"pads": [1, 0, 2, 3]}, {"pads_begin": (1, 0), "pads_end": (2, 3)},
    ),
    "output as large as the input over the stride": (
        WEIGHTS, {"padding": "same"}, {"padding": "SAME"}, {"auto_pad": "SAME_UPPER"}, {"auto_pad": "same_upper"},
    ),
    "the same, the odd zero first": (
        WEIGHTS, {}, {"padding": "SAME_LOWER"}, {"auto_pad": "SAME_LOWER"}, {"auto_pad": "same_lower"},
    ),
    "no padding": (
        WEIGHTS, {"padding": "valid"}, {"padding": "VALID"}, {"auto_pad": "VALID"}, {"auto_pad": "valid"},
    ),
    # d * (k - 1) is 2 * 2 and 1 * 1
    "padding of a transposed convolution removes pixels": (
        TRANSPOSED, {"padding": (1, 0), "dilation": (2, 1), "stride": (2, 1)},
        {"padding": [(4 - 1, 4 - 1), (1 - 0, 1 - 0)], "rhs_dilation": (2, 1), "strides": (2, 1)},
        {"pads": [1, 0, 1, 0], "dilations": [2, 1], "strides": [2, 1]},
        {"pads_begin": (1, 0), "pads_end": (1, 0), "dilations": (2, 1), "strides": (2, 1)},
    ),
    "more pixels at its end": (
        TRANSPOSED, {"output_padding": (1, 2), "stride": (2, 3), "padding": 1},
        {"padding": [(2 - 1, 2 - 1 + 1), (1 - 1, 1 - 1 + 2)], "strides": (2, 3)},
        {"output_padding": [1, 2], "strides": [2, 3], "pads": [1, 1, 1, 1]},
        {"output_padding": (1, 2), "strides": (2, 3), "pads_begin": (1, 1), "pads_end": (1, 1)},
    ),
}  # fmt: skip


def test_every_attribute_has_its_check() -> None:
    """The table of attributes has exactly the rows that are checked."""
    assert [row[0] for row in rows("Attributes")] == list(ATTRIBUTES)


def test_the_words_of_the_attributes() -> None:
    """Each cell of a row has the first word that its check gives to the package."""
    for name, *cells in rows("Attributes"):
        for cell, given in zip(cells, ATTRIBUTES[name][1:], strict=True):
            assert not given or next(iter(given)) in cell, (name, cell)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
@pytest.mark.parametrize("name", ATTRIBUTES)
@pytest.mark.parametrize("package", ["torch", "jax", "onnx"])
def test_attributes(client: convgrad.Client, package: str, name: str) -> None:
    """Each package computes what the service does with the attributes of a row."""
    shape, torch, lax, onnx, ours = ATTRIBUTES[name]
    transposed = shape is TRANSPOSED
    src, weights = integers(*SRC), integers(*shape)
    op, layout = ("ConvTranspose", "IOX") if transposed else ("Convolution", "OIX")
    expected = client.run(op, {"src": src, "weights": weights}, {**PLAIN, **ours, "weights_format": layout})
    if package == "onnx":
        found = in_onnx("ConvTranspose" if transposed else "Conv", src, weights, **onnx)
    elif package == "torch":
        if name == "the same, the odd zero first":
            pytest.skip("PyTorch has no word for it")
        if name == "different zeros":
            src = np.pad(src, ((0, 0), (0, 0), *zip(ours["pads_begin"], ours["pads_end"], strict=True)))
        found = in_torch("conv_transpose2d" if transposed else "conv2d", src, weights, **torch)
    elif transposed:
        found = in_jax("conv_transpose", src, weights, dimension_numbers=FIRST, transpose_kernel=True, **lax)
    else:
        given = {"window_strides": (1, 1), "padding": "VALID", "dimension_numbers": FIRST, **lax}
        found = in_jax("conv_general_dilated", src, weights, **given)
    np.testing.assert_array_equal(found, expected)


def test_strided_same() -> None:
    """With a stride above 1 PyTorch has no `same`, as the row says."""
    with pytest.raises(RuntimeError, match="strided"):
        in_torch("conv2d", integers(*SRC), integers(*WEIGHTS), padding="same", stride=2)


class Layouts:
    """The checks of the rows about tensors and layouts."""

    def __init__(self, client: convgrad.Client) -> None:
        self.client = client
        self.src, self.weights = integers(*SRC), integers(*WEIGHTS)
        self.expected = self.ours(self.src, self.weights)

    def ours(self, src: Array, weights: Array, op: str = "Convolution", **more: Any) -> Array:
        """Compute the service's result."""
        found: Array = self.client.run(op, {"src": src, "weights": weights}, {**PLAIN, **more})
        return found

    def positions(self) -> None:
        """Input and weights are the arguments of these names."""
        torch, lax = pytest.importorskip("torch"), pytest.importorskip("jax.lax")
        named = {"input": torch.tensor(self.src), "weight": torch.tensor(self.weights)}
        np.testing.assert_array_equal(torch.nn.functional.conv2d(**named).numpy(), self.expected)
        both = {"lhs": self.src, "rhs": self.weights, "window_strides": (1, 1), "padding": "VALID"}
        np.testing.assert_array_equal(lax.conv_general_dilated(**both), self.expected)
        np.testing.assert_array_equal(in_onnx("Conv", self.src, self.weights), self.expected)

    def gradients(self) -> None:
        """The gradients of a layer, given that of its output, are those of one call."""
        torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
        diff_dst, bias = integers(*self.expected.shape), integers(6)
        leaves = [torch.tensor(each, requires_grad=True) for each in (self.src, self.weights, bias)]
        torch.nn.functional.conv2d(*leaves).backward(torch.tensor(diff_dst))

        def layer(lhs: Array, rhs: Array, bias: Array) -> Any:
            return jax.lax.conv_general_dilated(lhs, rhs, (1, 1), "VALID") + bias[:, None, None]

        cotangents = jax.vjp(layer, self.src, self.weights, bias)[1](diff_dst)
        outputs = ["diff_src", "diff_weights", "diff_bias"]
        inputs = {"src": self.src, "diff_dst": diff_dst, "weights": self.weights}
        ours = self.client.run_detailed("ConvolutionBackwardWeights", inputs, PLAIN, outputs=outputs).outputs
        for name, leaf, cotangent in zip(outputs, leaves, cotangents, strict=True):
            np.testing.assert_array_equal(leaf.grad.numpy(), ours[name])
            np.testing.assert_array_equal(cotangent, ours[name])

    def last(self) -> None:
        """Channels last is a permutation without a copy in PyTorch, and (N, X, C) in JAX."""
        torch = pytest.importorskip("torch")
        tensor = torch.tensor(self.src).contiguous(memory_format=torch.channels_last)
        assert tensor.shape == self.src.shape
        memory = tensor.permute(0, 2, 3, 1)
        assert memory.is_contiguous()
        assert memory.data_ptr() == tensor.data_ptr()
        weights = np.ascontiguousarray(self.weights.transpose(2, 3, 1, 0))
        # The defaults: NXC and XIO.
        attributes = {name: value for name, value in PLAIN.items() if not name.endswith("format")}
        found = self.client.run("Convolution", {"src": memory.numpy(), "weights": weights}, attributes)
        expected = self.expected.transpose(0, 2, 3, 1)
        np.testing.assert_array_equal(found, expected)
        both = {"window_strides": (1, 1), "padding": "VALID", "dimension_numbers": LAST}
        np.testing.assert_array_equal(in_jax("conv_general_dilated", memory.numpy(), weights, **both), expected)

    def transposed(self) -> None:
        """The weights of a transposed convolution are (I, O/g, X); JAX has no groups there."""
        weights = integers(*TRANSPOSED)
        ours = self.ours(self.src, weights, "ConvTranspose", weights_format="IOX")
        np.testing.assert_array_equal(in_torch("conv_transpose2d", self.src, weights), ours)
        np.testing.assert_array_equal(in_onnx("ConvTranspose", self.src, weights), ours)
        named = {"strides": (1, 1), "padding": "VALID", "dimension_numbers": FIRST, "transpose_kernel": True}
        np.testing.assert_array_equal(in_jax("conv_transpose", self.src, weights, **named), ours)
        default = np.ascontiguousarray(weights.transpose(2, 3, 1, 0))
        attributes = {name: value for name, value in PLAIN.items() if name != "weights_format"}
        found = self.client.run("ConvTranspose", {"src": self.src, "weights": default}, attributes)
        np.testing.assert_array_equal(found, ours)
        halves = integers(4, 3, 3, 2)
        grouped = self.ours(self.src, halves, "ConvTranspose", weights_format="IOX", groups=2)
        np.testing.assert_array_equal(in_torch("conv_transpose2d", self.src, halves, groups=2), grouped)
        assert grouped.shape[1] == 6


TENSORS = {
    "input": "positions",
    "weights": "positions",
    "gradient of the output": "gradients",
    "gradients": "gradients",
    "channels first: (N, I, X)": "positions",
    "channels last: (N, X, I)": "last",
    "weights of a convolution, first": "positions",
    "the same, last": "last",
    "weights of a transposed convolution": "transposed",
}


def test_every_layout_has_its_check() -> None:
    """The table of tensors and layouts has exactly the rows that are checked."""
    assert [row[0] for row in rows("Tensors")] == list(TENSORS)


@pytest.mark.parametrize("check", sorted(set(TENSORS.values())))
def test_layouts(client: convgrad.Client, check: str) -> None:
    """The rows about tensors and layouts are true."""
    getattr(Layouts(client), check)()


def test_operations(client: convgrad.Client) -> None:
    """Each operation has the result of its namesake in PyTorch, and in JAX by `vjp`."""
    torch, jax = pytest.importorskip("torch"), pytest.importorskip("jax")
    functional, named = torch.nn.functional, torch.nn.grad
    src, bias = integers(*SRC), integers(6)
    checked = []
    for transposed in (False, True):
        weights = integers(*(TRANSPOSED if transposed else WEIGHTS))
        attributes = {**PLAIN, "weights_format": "IOX" if transposed else "OIX"}
        kind = "ConvTranspose" if transposed else "Convolution"

        def in_lax(lhs: Array, rhs: Array, bias: Array, transposed: bool = transposed) -> Any:
            given = {"padding": "VALID", "dimension_numbers": FIRST}
            if transposed:
                found = jax.lax.conv_transpose(lhs, rhs, (1, 1), transpose_kernel=True, **given)
            else:
                found = jax.lax.conv_general_dilated(lhs, rhs, (1, 1), **given)
            return found + bias[:, None, None]

        leaves = [torch.tensor(each, requires_grad=True) for each in (src, weights, bias)]
        dst = (functional.conv_transpose2d if transposed else functional.conv2d)(*leaves)
        forward, pull = jax.vjp(in_lax, src, weights, bias)
        diff_dst = integers(*dst.shape)
        dst.backward(torch.tensor(diff_dst))
        cotangents = pull(diff_dst)
        calls: dict[str, tuple[dict[str, Any], dict[str, Any], list[Any]]] = {
            kind: ({"src": src, "weights": weights, "bias": bias}, {}, [dst.detach(), forward]),
            f"{kind}BackwardWeights": (
                {"src": src, "diff_dst": diff_dst},
                {"weights_shape": weights.shape},
                [leaves[1].grad, cotangents[1]],
            ),
            f"{kind}BackwardData": (
                {"diff_dst": diff_dst, "weights": weights},
                {} if transposed else {"dst_shape": src.shape},
                [leaves[0].grad, cotangents[0]],
            ),
        }
        if not transposed:
            both = torch.tensor(src), torch.tensor(diff_dst)
            calls[f"{kind}BackwardWeights"][2].append(named.conv2d_weight(both[0], weights.shape, both[1]))
            calls[f"{kind}BackwardData"][2].append(named.conv2d_input(src.shape, torch.tensor(weights), both[1]))
            calls["BiasAddBackward"] = ({"diff_dst": diff_dst}, {}, [leaves[2].grad, cotangents[2]])
        for op, (inputs, more, others) in calls.items():
            chosen = {"data_format": "NCX"} if op.startswith("Bias") else {**attributes, **more}
            ours = client.run(op, inputs, chosen)
            for other in others:
                np.testing.assert_array_equal(np.asarray(other), ours)
            checked.append(op)
    in_table = [re.findall(r"`(\w+)`", row[-1])[0] for row in rows("Operations")]
    assert sorted(in_table) == sorted(checked)


def test_the_same_weights_the_other_way(client: convgrad.Client) -> None:
    """A gradient with respect to the input is a transposed convolution, whose IOX is the convolution's OIX."""
    diff_dst, weights = integers(2, 6, 5, 5), integers(*WEIGHTS)
    inputs = {"diff_dst": diff_dst, "weights": weights}
    gradient = client.run("ConvolutionBackwardData", inputs, {**PLAIN, "dst_shape": SRC})
    transposed = client.run("ConvTranspose", {"src": diff_dst, "weights": weights}, {**PLAIN, "weights_format": "IOX"})
    np.testing.assert_array_equal(gradient, transposed)


def written(here: Here) -> str:
    """Return the cell of the page for what a name is here."""
    names = " or ".join(" and ".join(f"`{name}`" for name in each.split()) for each in here.names)
    notes = "; ".join(filter(None, (here.note, here.transposed and f"transposed: {here.transposed}")))
    return ", ".join(filter(None, (names, notes)))


def test_names_in_errors() -> None:
    """The names that errors translate are those of the page."""
    found = [(name, here) for names, here in rows("Names in errors") for name in re.findall(r"`([^`]+)`", names)]
    expected = [(name, written(here)) for name, here in NAMES.items()]
    expected += [(name, written(here)) for name, here in OPERATIONS.items()]
    operations = [(name.lower().replace("_", ""), here) for name, here in found[len(NAMES) :]]
    assert found[: len(NAMES)] + operations == expected


def test_errors_translate_the_tables() -> None:
    """The first name of a cell of the tables is translated to one in the last cell."""
    for *cells, here in (row[1:] for title in ("Tensors", "Attributes") for row in rows(title)):
        ours = set(re.findall(r"`(\w+)", here))
        for name in re.findall(r"^`([a-zX_]+)[=`]", "\n".join(cells), re.MULTILINE):
            translated = name_here(name)
            known = name in ours or (translated and ours & set(re.findall(r"\w+", written(translated))))
            # JAX's padding has the further pixels of a transposed convolution too.
            assert known or (name == "padding" and ours == {"output_padding"}), (name, here)
    for *cells, here in rows("Operations"):
        for name in re.findall(r"^`([\w.]+)`(?! of)", "\n".join(cells), re.MULTILINE):
            found = operation_here(name)
            assert name in here or (found and f"`{found.names[0]}`" in here), (name, here)
    assert [format_here(name, DATA_FORMATS) for name in ("NCHW", "NHWC")] == ["NCX", "NXC"]
    assert [format_here(name, WEIGHTS_FORMATS) for name in ("OIHW", "HWIO")] == ["OIX", "XIO"]


@pytest.mark.parametrize("name", ["float32", "torch.float32", "torch.float", "FP32", "F32", "numpy.float32", "<f4"])
def test_names_of_dtypes(name: str) -> None:
    """Names that other frameworks give an element type are translated."""
    here = dtype_here(name)
    assert here is not None
    assert here.name == "f32"
    assert dtype_here(f"{name}x") is None
