"""The operations as methods of both clients, with attributes as keyword arguments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, Literal, Required, TypedDict, TypeVar, Unpack

from convgrad._core import Algorithm
from convgrad._requests import Inputs
from convgrad._tensors import Tensor

__all__ = ["Attributes", "Operations", "TransposeAttributes"]

T = TypeVar("T")


class Attributes(TypedDict, total=False):
    """Attributes of every operation; absent ones have the defaults of the operation's page.

    Lists have one integer per spatial axis. Pads are required unless `auto_pad` is set; dilation 1 is dense.
    """

    strides: Required[Sequence[int]]
    dilations: Required[Sequence[int]]
    pads_begin: Sequence[int]
    pads_end: Sequence[int]
    auto_pad: Literal["none", "same_upper", "same_lower", "valid"]
    groups: int
    data_format: Literal["NXC", "NCX"]
    weights_format: Literal["XIO", "OIX", "XOI", "IOX"]


class TransposeAttributes(Attributes, total=False):
    """Attributes of the transposed operations, and of ConvolutionBackwardData, which is one in all but name."""

    output_padding: Sequence[int]


class Operations(ABC, Generic[T]):
    """A method for each operation; `T` is what a call returns: an array, or a coroutine of one."""

    @abstractmethod
    def run(
        self,
        op: str,
        inputs: Inputs,
        attributes: Mapping[str, Any] | None = None,
        *,
        reference: bool = False,
        reproducible: bool = False,
        algorithm: Algorithm = "direct",
        deadline: float | None = None,
    ) -> T:
        """Compute `op`, under any of its names, and return its output.

        `inputs` are arrays or paths of `.npy` files by name; `attributes` are those on the operation's page.
        `reference` selects the slow kernel that accumulates in float64, and alone takes tensors of that dtype.
        `reproducible` promises the same bits on every kind of processor: see docs/reproducibility.md.
        `algorithm` may be "winograd", which is refused where it can't be used, or "auto", the faster one: see
        docs/algorithms.md. After `deadline` seconds the service stops and the call raises `DeadlineExceeded`. If the
        reply breaks off, the call is retried.
        """

    def conv_transpose_backward_weights(
        self,
        src: Tensor,
        diff_dst: Tensor,
        *,
        weights_shape: Sequence[int],
        reference: bool = False,
        reproducible: bool = False,
        algorithm: Algorithm = "direct",
        deadline: float | None = None,
        **attributes: Unpack[TransposeAttributes],
    ) -> T:
        """Compute ConvTransposeBackwardWeights, the gradient of a transposed convolution for its weights.

        `src` is (N, I, X) and `diff_dst` (N, O, Y) in NCX, with the channels last in NXC; the result has
        `weights_shape`, of which `weights_format` names the axes, and the dtype of the inputs.

        Attributes (defaults in brackets):

        * `strides` (required): Step of the weights along each spatial axis.
        * `pads_begin` (required unless `auto_pad` is set): Zeros before the first element of each spatial axis. `[]`
          means no padding. Ignored, but still checked, when `auto_pad` is not `none`.
        * `pads_end` (required unless `auto_pad` is set): Zeros after the last element of each spatial axis. `[]` means
          no padding. Ignored, but still checked, when `auto_pad` is not `none`.
        * `dilations` (required): Distance between the taps of the weights; 1 is a dense kernel.
        * `auto_pad` [none]: How padding is determined: `none` uses `pads_begin` and `pads_end`, `valid` means no
          padding, `same_upper` and `same_lower` put an odd zero at the end or at the beginning. Case is ignored.
        * `output_padding`: Extra elements at the end of each spatial axis of `diff_dst`, fewer than the stride.
          Inferred from the shapes when absent.
        * `groups` [1]: Number of groups; it must divide the channels of `src` and of `dst`.
        * `data_format` [NXC]: Axis order of the data tensors. One of NXC, NCX.
        * `weights_format` [XOI]: Axis order of the weights. One of XIO, OIX, XOI, IOX.
        * `weights_shape` (required): Shape of the weights in the order of `weights_format`.
        """
        inputs = {"src": src, "diff_dst": diff_dst, "weights_shape": weights_shape}
        return self.run(
            "ConvTransposeBackwardWeights",
            inputs,
            attributes,
            reference=reference,
            reproducible=reproducible,
            algorithm=algorithm,
            deadline=deadline,
        )

    def convolution_backward_weights(
        self,
        src: Tensor,
        diff_dst: Tensor,
        *,
        weights_shape: Sequence[int],
        reference: bool = False,
        reproducible: bool = False,
        algorithm: Algorithm = "direct",
        deadline: float | None = None,
        **attributes: Unpack[Attributes],
    ) -> T:
        """Compute ConvolutionBackwardWeights, the gradient of a convolution for its weights.

        `src` is (N, I, X) and `diff_dst` (N, O, Y) in NCX, with the channels last in NXC; the result has
        `weights_shape`, of which `weights_format` names the axes, and the dtype of the inputs.

        Attributes (defaults in brackets):

        * `strides` (required): Step of the weights along each spatial axis.
        * `pads_begin` (required unless `auto_pad` is set): Zeros before the first element of each spatial axis. `[]`
          means no padding. Ignored, but still checked, when `auto_pad` is not `none`.
        * `pads_end` (required unless `auto_pad` is set): Zeros after the last element of each spatial axis. `[]` means
          no padding. Ignored, but still checked, when `auto_pad` is not `none`.
        * `dilations` (required): Distance between the taps of the weights; 1 is a dense kernel.
        * `auto_pad` [none]: How padding is determined: `none` uses `pads_begin` and `pads_end`, `valid` means no
          padding, `same_upper` and `same_lower` put an odd zero at the end or at the beginning. Case is ignored.
        * `groups` [1]: Number of groups; it must divide the channels of `src` and of `dst`.
        * `data_format` [NXC]: Axis order of the data tensors. One of NXC, NCX.
        * `weights_format` [XIO]: Axis order of the weights. One of XIO, OIX, XOI, IOX.
        * `weights_shape` (required): Shape of the weights in the order of `weights_format`.
        """
        inputs = {"src": src, "diff_dst": diff_dst, "weights_shape": weights_shape}
        return self.run(
            "ConvolutionBackwardWeights",
            inputs,
            attributes,
            reference=reference,
            reproducible=reproducible,
            algorithm=algorithm,
            deadline=deadline,
        )

    def conv_transpose(
        self,
        src: Tensor,
        weights: Tensor,
        bias: Tensor | None = None,
        *,
        reference: bool = False,
        reproducible: bool = False,
        algorithm: Algorithm = "direct",
        deadline: float | None = None,
        **attributes: Unpack[TransposeAttributes],
    ) -> T:
        """Compute ConvTranspose, the transposed convolution itself, plus `bias` of shape (O) when given.

        `src` is (N, I, X) in NCX, with the channels last in NXC; `weights_format` names the axes of
        `weights`.

        Attributes (defaults in brackets):

        * `strides` (required): Step of the weights along each spatial axis.
        * `pads_begin` (required unless `auto_pad` is set): Zeros before the first element of each spatial axis. `[]`
          means no padding. Ignored, but still checked, when `auto_pad` is not `none`.
        * `pads_end` (required unless `auto_pad` is set): Zeros after the last element of each spatial axis. `[]` means
          no padding. Ignored, but still checked, when `auto_pad` is not `none`.
        * `dilations` (required): Distance between the taps of the weights; 1 is a dense kernel.
        * `auto_pad` [none]: How padding is determined: `none` uses `pads_begin` and `pads_end`, `valid` means no
          padding, `same_upper` and `same_lower` put an odd zero at the end or at the beginning. Case is ignored.
        * `output_padding`: Extra elements at the end of each spatial axis of `dst`, fewer than the stride. Zeros when
          absent.
        * `groups` [1]: Number of groups; it must divide the channels of `src` and of `dst`.
        * `data_format` [NXC]: Axis order of the data tensors. One of NXC, NCX.
        * `weights_format` [XOI]: Axis order of the weights. One of XIO, OIX, XOI, IOX.
        """
        inputs: dict[str, Tensor] = {"src": src, "weights": weights}
        if bias is not None:
            inputs["bias"] = bias
        return self.run(
            "ConvTranspose",
            inputs,
            attributes,
            reference=reference,
            reproducible=reproducible,
            algorithm=algorithm,
            deadline=deadline,
        )

    def convolution(
        self,
        src: Tensor,
        weights: Tensor,
        bias: Tensor | None = None,
        *,
        reference: bool = False,
        reproducible: bool = False,
        algorithm: Algorithm = "direct",
        deadline: float | None = None,
        **attributes: Unpack[Attributes],
    ) -> T:
        """Compute Convolution, plus `bias` of shape (O) when given.

        `src` is (N, I, X) in NCX, with the channels last in NXC; `weights_format` names the axes of
        `weights`.

        Attributes (defaults in brackets):

        * `strides` (required): Step of the weights along each spatial axis.
        * `pads_begin` (required unless `auto_pad` is set): Zeros before the first element of each spatial axis. `[]`
          means no padding. Ignored, but still checked, when `auto_pad` is not `none`.
        * `pads_end` (required unless `auto_pad` is set): Zeros after the last element of each spatial axis. `[]` means
          no padding. Ignored, but still checked, when `auto_pad` is not `none`.
        * `dilations` (required): Distance between the taps of the weights; 1 is a dense kernel.
        * `auto_pad` [none]: How padding is determined: `none` uses `pads_begin` and `pads_end`, `valid` means no
          padding, `same_upper` and `same_lower` put an odd zero at the end or at the beginning. Case is ignored.
        * `groups` [1]: Number of groups; it must divide the channels of `src` and of `dst`.
        * `data_format` [NXC]: Axis order of the data tensors. One of NXC, NCX.
        * `weights_format` [XIO]: Axis order of the weights. One of XIO, OIX, XOI, IOX.
        """
        inputs: dict[str, Tensor] = {"src": src, "weights": weights}
        if bias is not None:
            inputs["bias"] = bias
        return self.run(
            "Convolution",
            inputs,
            attributes,
            reference=reference,
            reproducible=reproducible,
            algorithm=algorithm,
            deadline=deadline,
        )

    def convolution_backward_data(
        self,
        diff_dst: Tensor,
        weights: Tensor,
        *,
        dst_shape: Sequence[int] | None = None,
        reference: bool = False,
        reproducible: bool = False,
        algorithm: Algorithm = "direct",
        deadline: float | None = None,
        **attributes: Unpack[TransposeAttributes],
    ) -> T:
        """Compute ConvolutionBackwardData, the gradient of a convolution for its input.

        `diff_dst` is (N, O, Y) in NCX, with the channels last in NXC; `weights_format` names the axes of `weights`. The
        result has `dst_shape`; without it, the smallest shape that gives `diff_dst`, plus `output_padding`.

        Attributes (defaults in brackets):

        * `strides` (required): Step of the weights along each spatial axis.
        * `pads_begin` (required unless `auto_pad` is set): Zeros before the first element of each spatial axis. `[]`
          means no padding. Ignored, but still checked, when `auto_pad` is not `none`.
        * `pads_end` (required unless `auto_pad` is set): Zeros after the last element of each spatial axis. `[]` means
          no padding. Ignored, but still checked, when `auto_pad` is not `none`.
        * `dilations` (required): Distance between the taps of the weights; 1 is a dense kernel.
        * `auto_pad` [none]: How padding is determined: `none` uses `pads_begin` and `pads_end`, `valid` means no
          padding, `same_upper` and `same_lower` put an odd zero at the end or at the beginning. Case is ignored.
        * `output_padding`: Extra elements at the end of each spatial axis of `diff_src`, fewer than the stride.
          Inferred from `dst_shape` when absent, or zeros without it.
        * `groups` [1]: Number of groups; it must divide the channels of `src` and of `dst`.
        * `data_format` [NXC]: Axis order of the data tensors. One of NXC, NCX.
        * `weights_format` [XIO]: Axis order of the weights. One of XIO, OIX, XOI, IOX.
        * `dst_shape`: Shape of the result, `diff_src`, in the order of `data_format`. Without it the spatial sizes are
          strides * (size of `diff_dst` - 1) + (kernel - 1) * dilations + 1 - pads_begin - pads_end + output_padding. A
          list of zeros counts as absent.
        """
        inputs: dict[str, Tensor | Sequence[int]] = {"diff_dst": diff_dst, "weights": weights}
        if dst_shape is not None:
            inputs["dst_shape"] = dst_shape
        return self.run(
            "ConvolutionBackwardData",
            inputs,
            attributes,
            reference=reference,
            reproducible=reproducible,
            algorithm=algorithm,
            deadline=deadline,
        )

    def conv_transpose_backward_data(
        self,
        diff_dst: Tensor,
        weights: Tensor,
        *,
        reference: bool = False,
        reproducible: bool = False,
        algorithm: Algorithm = "direct",
        deadline: float | None = None,
        **attributes: Unpack[TransposeAttributes],
    ) -> T:
        """Compute ConvTransposeBackwardData, the gradient of a transposed convolution for its input.

        `diff_dst` is (N, O, Y) in NCX, with the channels last in NXC; `weights_format` names the axes of `weights`.

        Attributes (defaults in brackets):

        * `strides` (required): Step of the weights along each spatial axis.
        * `pads_begin` (required unless `auto_pad` is set): Zeros before the first element of each spatial axis. `[]`
          means no padding. Ignored, but still checked, when `auto_pad` is not `none`.
        * `pads_end` (required unless `auto_pad` is set): Zeros after the last element of each spatial axis. `[]` means
          no padding. Ignored, but still checked, when `auto_pad` is not `none`.
        * `dilations` (required): Distance between the taps of the weights; 1 is a dense kernel.
        * `auto_pad` [none]: How padding is determined: `none` uses `pads_begin` and `pads_end`, `valid` means no
          padding, `same_upper` and `same_lower` put an odd zero at the end or at the beginning. Case is ignored.
        * `output_padding`: Extra elements at the end of each spatial axis of `diff_dst`, fewer than the stride.
          Inferred from the shapes when absent.
        * `groups` [1]: Number of groups; it must divide the channels of `src` and of `dst`.
        * `data_format` [NXC]: Axis order of the data tensors. One of NXC, NCX.
        * `weights_format` [XOI]: Axis order of the weights. One of XIO, OIX, XOI, IOX.
        """
        inputs = {"diff_dst": diff_dst, "weights": weights}
        return self.run(
            "ConvTransposeBackwardData",
            inputs,
            attributes,
            reference=reference,
            reproducible=reproducible,
            algorithm=algorithm,
            deadline=deadline,
        )

    def bias_add(
        self,
        src: Tensor,
        bias: Tensor,
        *,
        data_format: Literal["NXC", "NCX"] = "NXC",
        reference: bool = False,
        reproducible: bool = False,
        deadline: float | None = None,
    ) -> T:
        """Compute BiasAdd: `bias` of shape (O) added to every channel of `src`.

        `src` is (N, O, X) in NCX, with the channels last in NXC, and has from 0 to 3 spatial axes.

        Attributes (defaults in brackets):

        * `data_format` [NXC]: Axis order of the data tensors. One of NXC, NCX.
        """
        inputs = {"src": src, "bias": bias}
        return self.run(
            "BiasAdd",
            inputs,
            {"data_format": data_format},
            reference=reference,
            reproducible=reproducible,
            deadline=deadline,
        )

    def bias_add_backward(
        self,
        diff_dst: Tensor,
        *,
        data_format: Literal["NXC", "NCX"] = "NXC",
        reference: bool = False,
        reproducible: bool = False,
        deadline: float | None = None,
    ) -> T:
        """Compute BiasAddBackward, the gradient of a bias: the sum of each channel of `diff_dst`, of shape (O).

        `diff_dst` is (N, O, X) in NCX, with the channels last in NXC, and has two or three spatial axes.

        Attributes (defaults in brackets):

        * `data_format` [NXC]: Axis order of the data tensors. One of NXC, NCX.
        """
        inputs, attributes = {"diff_dst": diff_dst}, {"data_format": data_format}
        return self.run(
            "BiasAddBackward", inputs, attributes, reference=reference, reproducible=reproducible, deadline=deadline
        )
