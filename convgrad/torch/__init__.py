"""PyTorch layers whose outputs and gradients convgrad computes: needs the extra `[torch]`.

`replace(model)` swaps them in for the model's own; `Conv2d` and the others are made like those of `torch.nn`, and
`conv` and its companions are the functions below them. Everything is differentiable, any number of times.

>>> model = convgrad.torch.replace(model)  # doctest: +SKIP
>>> loss(model(images), labels).backward()  # doctest: +SKIP
"""

from convgrad._layer import use
from convgrad.torch._backend import Backend
from convgrad.torch._functional import (
    bias_add,
    bias_grad,
    conv,
    conv_input,
    conv_transpose,
    conv_transpose_input,
    conv_transpose_weight,
    conv_weight,
)
from convgrad.torch._modules import (
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTranspose1d,
    ConvTranspose2d,
    ConvTranspose3d,
    replace,
)

__all__ = [
    "Backend",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "bias_add",
    "bias_grad",
    "conv",
    "conv_input",
    "conv_transpose",
    "conv_transpose_input",
    "conv_transpose_weight",
    "conv_weight",
    "replace",
    "use",
]
