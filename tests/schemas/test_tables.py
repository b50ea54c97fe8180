"""The operation tables and their lookup."""

from __future__ import annotations

import copy

import pytest

from convgrad._errors import UnknownOperation
from schemas.tables import OPERATIONS, find_operation, near_miss, operation_names


@pytest.mark.parametrize(
    ("name", "operation", "dialect"),
    [
        ("ConvTransposeBackwardWeights", "ConvTransposeBackwardWeights", "new"),
        ("ConvTransposeBackwardWeights-1", "ConvTransposeBackwardWeights", "new"),
        ("ConvTransposeBackpropFilters", "ConvTransposeBackwardWeights", "old"),
        ("ConvTransposeBackpropFilters-1", "ConvTransposeBackwardWeights", "old"),
        ("ConvolutionBackwardWeights", "ConvolutionBackwardWeights", "new"),
        ("ConvolutionBackpropFilters-1", "ConvolutionBackwardWeights", "old"),
        ("ConvTranspose", "ConvTranspose", "new"),
        ("ConvTranspose-1", "ConvTranspose", "new"),
        ("Convolution-1", "Convolution", "new"),
        ("ConvolutionBackwardData", "ConvolutionBackwardData", "new"),
        ("ConvolutionBackpropData-1", "ConvolutionBackwardData", "old"),
        ("ConvTransposeBackwardData", "ConvTransposeBackwardData", "new"),
        ("BiasAdd-1", "BiasAdd", "new"),
        ("BiasAddBackward", "BiasAddBackward", "new"),
        ("BiasAddBackprop-1", "BiasAddBackward", "old"),
    ],
)
def test_names(name: str, operation: str, dialect: str) -> None:
    """Every name and alias resolves to its operation, with the dialect of the reply."""
    called = find_operation(name)
    assert (called.operation.name, called.called_as, called.dialect) == (operation, name, dialect)


def test_every_name_is_listed_once() -> None:
    """There are twenty-four names: twelve, each with and without the version suffix."""
    assert len(operation_names()) == len(set(operation_names())) == 24


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
        ("conv2d_weight", "ConvolutionBackwardWeights"),
        ("torch.nn.grad.conv3d_input", "ConvolutionBackwardData"),
        ("Conv2DBackpropFilter", "ConvolutionBackwardWeights"),
        ("Conv3DBackpropInputV2", "ConvolutionBackwardData"),
        ("ConvTranspose2d", "ConvTranspose"),
        ("F.conv_transpose1d", "ConvTranspose"),
        ("tf.nn.conv2d_transpose", "ConvTranspose"),
        ("jax.lax.conv_general_dilated", "Convolution"),
        ("DepthwiseConv2dNativeBackpropFilter", "ConvolutionBackwardWeights, with groups, one for each channel"),
        ("tf.nn.depthwise_conv2d_backprop_input", "ConvolutionBackwardData, with groups, one for each channel"),
        ("deconvolution_backward_weights", "ConvTransposeBackwardWeights"),
        ("cudnnConvolutionBackwardFilter", "ConvolutionBackwardWeights"),
        ("tf.nn.bias_add", "BiasAdd"),
        ("tf.raw_ops.BiasAddGrad", "BiasAddBackward"),
    ],
)
def test_names_of_other_frameworks(name: str, here: str) -> None:
    """The error for an operation of another framework gives its name here."""
    with pytest.raises(UnknownOperation, match=rf"; use {here}(, with .*)?$") as caught:
        find_operation(name)
    assert caught.value.data["hint"] == here.partition(",")[0]


def test_a_misspelt_name_gets_a_hint() -> None:
    """The error for a near miss suggests the intended operation."""
    with pytest.raises(UnknownOperation, match="did you mean ConvTransposeBackwardWeights"):
        find_operation("ConvTransposeBackwardWeight")


@pytest.mark.parametrize(
    ("name", "default"),
    [
        ("ConvTransposeBackpropFilters", "XIO"),
        ("ConvTransposeBackwardWeights", "XOI"),
        ("ConvTranspose", "XOI"),
        ("ConvTranspose-1", "XOI"),
        ("ConvolutionBackpropFilters", "XIO"),
        ("ConvolutionBackwardWeights", "XIO"),
    ],
)
def test_the_default_weights_format_depends_on_the_name_called(name: str, default: str) -> None:
    """An absent weights_format is XIO under an old name, and XOI for a transposed operation under a new one."""
    called = find_operation(name)
    assert called.operation.attribute["weights_format"].default_in(called.dialect) == default


def test_spellings_are_unambiguous() -> None:
    """No spelling refers to two attributes, or two inputs, of one operation."""
    for operation in OPERATIONS:
        for rows, spellings in (
            (operation.attributes, operation.attribute_spellings),
            (operation.inputs, operation.input_spellings),
        ):
            assert len(spellings) == sum(2 if row.old_name else 1 for row in rows)


def test_a_called_operation_is_one_object() -> None:
    """A copy, such as pickling makes, is the same object: calls compare fast."""
    called = find_operation("ConvTranspose")
    assert copy.deepcopy(called) is called


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("dilation", "dilations"),
        ("Strides", "strides"),
        ("padsbegin", "pads_begin"),
        ("zzz", None),
        (3, None),
        ("", None),
    ],
)
def test_near_misses(word: object, meant: str | None) -> None:
    """A suggestion ignores case and underscores, and a word far from all known ones gets none."""
    assert near_miss(word, ("strides", "dilations", "pads_begin")) == meant
