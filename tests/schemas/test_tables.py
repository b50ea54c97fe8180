"""The operation tables and their lookup."""

from __future__ import annotations

import copy

import pytest

from convgrad._errors import UnknownOperation
from schemas.tables import find_operation, near_miss, operation_names


@pytest.mark.parametrize(
    ("name", "operation", "dialect"),
    [
        ("ConvTransposeBackwardWeights-1", "ConvTransposeBackwardWeights", "new"),
        ("ConvTransposeBackpropFilters", "ConvTransposeBackwardWeights", "old"),
        ("ConvolutionBackpropFilters-1", "ConvolutionBackwardWeights", "old"),
        ("ConvTranspose", "ConvTranspose", "new"),
        ("Convolution-1", "Convolution", "new"),
        ("ConvolutionBackpropData-1", "ConvolutionBackwardData", "old"),
        ("ConvTransposeBackwardData", "ConvTransposeBackwardData", "new"),
        ("BiasAdd-1", "BiasAdd", "new"),
        ("BiasAddBackprop-1", "BiasAddBackward", "old"),
    ],
)
def test_names(name: str, operation: str, dialect: str) -> None:
    """Every name and alias resolves to its operation, with the dialect of the reply: twelve, and as many with -1."""
    called = find_operation(name)
    assert (called.operation.name, called.called_as, called.dialect) == (operation, name, dialect)
    assert len(operation_names()) == len(set(operation_names())) == 24
    if operation == "ConvTransposeBackwardWeights":
        default = called.operation.attribute["weights_format"].default_in(called.dialect)
        assert default == ("XIO" if dialect == "old" else "XOI")


@pytest.mark.parametrize(
    "name", ["", "Conv", "ConvTranspose-2", "convtranspose", "x" * 10**6, "\ud800", None, 3, [], {}]
)
def test_unknown_names(name: object) -> None:
    """Any other name is an unknown operation; the message repeats it only if it is short and printable."""
    with pytest.raises(UnknownOperation, match=r"there is no (such operation|operation [ -~]{1,66}): the") as caught:
        find_operation(name)
    assert len(caught.value.message) < 350
    assert caught.value.message.isascii()


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("torch.nn.grad.conv3d_input", "ConvolutionBackwardData"),
        ("Conv3DBackpropInputV2", "ConvolutionBackwardData"),
        ("F.conv_transpose1d", "ConvTranspose"),
        ("jax.lax.conv_general_dilated", "Convolution"),
        ("tf.nn.depthwise_conv2d_backprop_input", "ConvolutionBackwardData, with groups, one for each channel"),
        ("deconvolution_backward_weights", "ConvTransposeBackwardWeights"),
        ("cudnnConvolutionBackwardFilter", "ConvolutionBackwardWeights"),
        ("tf.nn.bias_add", "BiasAdd"),
    ],
)
def test_names_of_other_frameworks(name: str, here: str) -> None:
    """The error for an operation of another framework gives its name here."""
    with pytest.raises(UnknownOperation, match=rf"; use {here}(, with .*)?$") as caught:
        find_operation(name)
    assert caught.value.data["hint"] == here.partition(",")[0]
    with pytest.raises(UnknownOperation, match="did you mean ConvTransposeBackwardWeights"):
        find_operation("ConvTransposeBackwardWeight")


def test_a_called_operation_is_one_object() -> None:
    """A copy, such as pickling makes, is the same object: calls compare fast."""
    called = find_operation("ConvTranspose")
    assert copy.deepcopy(called) is called


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("dilation", "dilations"), ("Strides", "strides"), ("padsbegin", "pads_begin"), ("zzz", None), (3, None),
        ("", None),
    ],
)  # fmt: skip
def test_near_misses(word: object, meant: str | None) -> None:
    """A suggestion ignores case and underscores, and a word far from all known ones gets none."""
    assert near_miss(word, ("strides", "dilations", "pads_begin")) == meant
