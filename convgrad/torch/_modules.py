"""The layers of `torch.nn`, computed by convgrad."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar, TypeVar

from torch import Tensor, nn

from convgrad.torch._backend import Backend
from convgrad.torch._functional import conv, conv_transpose

__all__ = ["Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d", "replace"]

M = TypeVar("M", bound=nn.Module)
L = TypeVar("L", bound="_Layer")


class _Layer:
    """The base class of all layers; the class of PyTorch comes after it in their bases."""

    replaces: ClassVar[type[nn.Module]]
    backend: Backend

    def __init__(self, *args: Any, backend: Backend | None = None, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.backend = backend or Backend()

    @classmethod
    def of(cls: type[L], layer: nn.Module, backend: Backend | None = None) -> L:
        """Return a layer that takes over the parameters, hooks and settings of one of `torch.nn`.

        Both then share their parameters, so that optimizers made before keep working. Raises `TypeError` for any other
        class, a subclass too, which may compute something else.
        """
        if type(layer) is not cls.replaces:
            raise TypeError(f"{cls.__name__}.of needs a torch.nn.{cls.replaces.__name__}, not {type(layer).__name__}")
        made = cls.__new__(cls)
        made.__dict__.update(layer.__dict__)
        made.backend = backend or Backend()
        return made


class _Convolution(_Layer):
    """The forward pass of Conv1d to Conv3d."""

    def forward(self: Any, input: Tensor) -> Tensor:  # noqa: A002 - as PyTorch calls it
        """Compute the output, of shape (N, O, X) or, without a batch, (O, X)."""
        padding = self.padding
        if self.padding_mode != "zeros":
            input = nn.functional.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode)  # noqa: A001
            padding = 0
        return conv(
            input, self.weight, self.bias, self.stride, padding, self.dilation, self.groups, backend=self.backend
        )


class _ConvTranspose(_Layer):
    """The forward pass of ConvTranspose1d to ConvTranspose3d."""

    def forward(self: Any, input: Tensor, output_size: list[int] | None = None) -> Tensor:  # noqa: A002
        """Compute the output; `output_size` chooses one where several are possible."""
        extra = self._output_padding(
            input, output_size, self.stride, self.padding, self.kernel_size, len(self.stride), self.dilation
        )
        return conv_transpose(
            input, self.weight, self.bias, self.stride, self.padding, extra, self.groups, self.dilation,
            backend=self.backend,
        )  # fmt: skip


class Conv1d(_Convolution, nn.Conv1d):
    """`torch.nn.Conv1d` by Convolution and its gradients; takes its arguments, and a `backend`."""

    replaces = nn.Conv1d


class Conv2d(_Convolution, nn.Conv2d):
    """`torch.nn.Conv2d` by Convolution and its gradients; takes its arguments, and a `backend`."""

    replaces = nn.Conv2d


class Conv3d(_Convolution, nn.Conv3d):
    """`torch.nn.Conv3d` by Convolution and its gradients; takes its arguments, and a `backend`."""

    replaces = nn.Conv3d


class ConvTranspose1d(_ConvTranspose, nn.ConvTranspose1d):
    """`torch.nn.ConvTranspose1d` by ConvTranspose and its gradients; takes its arguments, and a `backend`."""

    replaces = nn.ConvTranspose1d


class ConvTranspose2d(_ConvTranspose, nn.ConvTranspose2d):
    """`torch.nn.ConvTranspose2d` by ConvTranspose and its gradients; takes its arguments, and a `backend`."""

    replaces = nn.ConvTranspose2d


class ConvTranspose3d(_ConvTranspose, nn.ConvTranspose3d):
    """`torch.nn.ConvTranspose3d` by ConvTranspose and its gradients; takes its arguments, and a `backend`."""

    replaces = nn.ConvTranspose3d


_LAYERS: dict[type[nn.Module], type[_Layer]] = {
    layer.replaces: layer for layer in (Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d)
}


def replace(model: M, backend: Backend | None = None) -> M:
    """Replace every convolution of a model, at any depth, by one that convgrad computes; return the model.

    Parameters, names, hooks and the model's `state_dict` stay as they are. A model that is a convolution itself is
    returned as another module. Subclasses of the layers of `torch.nn`, as `torch.nn.utils.parametrize` and lazy layers
    make them, are left as they are, with a warning: replace first, then parametrize.
    """
    made: dict[nn.Module, nn.Module] = {}  # a layer that is used twice is replaced by one layer
    whole = _replaced(model, "the model", backend or Backend(), made)
    for name, parent in [*whole.named_modules()]:
        for key, child in [*parent._modules.items()]:
            if child is not None:
                setattr(parent, key, _replaced(child, f"{name}.{key}".lstrip("."), backend or Backend(), made))
    return whole


def _replaced(module: nn.Module, name: str, backend: Backend, made: dict[nn.Module, nn.Module]) -> nn.Module:
    if module in made:
        return made[module]
    if (layer := _LAYERS.get(type(module))) is not None:
        made[module] = layer.of(module, backend)
        return made[module]
    if isinstance(module, tuple(_LAYERS)) and not isinstance(module, _Layer):
        kind = type(module).__name__
        warnings.warn(f"{name} stays as it is: {kind} is a subclass of a layer of torch.nn", stacklevel=3)
    return module
