"""Weight gradients that cuDNN computed on a GPU: what they are judged to be, as f32 and as what they are.

`cudnn_h200.npz` has results of PyTorch 2.11 with cuDNN 9.19 on an NVIDIA H200, of 2026-11, all f32 and OIX, with
`torch.backends.cudnn.allow_tf32` off (f32) and on (tf32), NCHW or channels-last (nhwc). Keys are layer|data|way. Of
each layer it has the first dst channels; `layer|data` is the SHA-256 of all inputs, which are drawn here.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.problems import Case
from tests.verify.judged import verify
from verify.arithmetic import Arithmetic

LAYERS = {  # in the order in which they were recorded, from whose numbers the seeds follow
    0: ("3x3 64", (4, 64, 64, 1, 28, 3, 1, 1)),
    1: ("3x3 s2", (4, 32, 48, 1, 33, 3, 2, 1)),
    3: ("5x5", (4, 16, 24, 1, 31, 5, 1, 2)),
    6: ("groups", (4, 64, 64, 8, 28, 3, 1, 1)),
}
DATA = {"normal": 0, "integers": 2}
WINOGRAD = Arithmetic(algorithm="winograd F(4, 3)")
TF32, CUT_TF32 = Arithmetic("tf32"), Arithmetic("tf32", "f32 truncated")


@cache
def recorded() -> dict[str, npt.NDArray[Any]]:
    """Return the file."""
    with np.load(Path(__file__).with_name("cudnn_h200.npz")) as file:
        return dict(file)


@cache
def layer(number: int, data: str) -> tuple[Case, dict[str, npt.NDArray[np.float32]]]:
    """Return a layer and its inputs."""
    name, (n, i, o, groups, size, taps, stride, pad) = LAYERS[number]
    out = (size + 2 * pad - taps) // stride + 1
    rng = np.random.default_rng(1000 + 10 * number + DATA[data])
    src, weights, diff_dst = (
        rng.integers(-3, 4, shape).astype(np.float32) if data == "integers" else rng.standard_normal(shape, np.float32)
        for shape in ((n, i, size, size), (o, i // groups, taps, taps), (n, o, out, out))
    )
    sent = hashlib.sha256(b"".join([each.tobytes() for each in (src, weights, diff_dst)])).hexdigest()
    assert sent == str(recorded()[f"{name}|{data}"])
    kept = next(len(found) for key, found in recorded().items() if key.startswith(f"{name}|{data}|"))
    case = Case(n=n, src_channels=i, dst_channels=kept, groups=groups, src_spatial=(size,) * 2, dst_spatial=(out,) * 2,
                kernel=(taps,) * 2, strides=(stride,) * 2, pads_begin=(pad,) * 2, pads_end=(pad,) * 2)  # fmt: skip
    return case, {"src": src, "diff_dst": np.ascontiguousarray(diff_dst[:, :kept])}


@pytest.mark.parametrize(
    ("number", "data", "way", "said", "words"),
    [
        (0, "normal", "f32", WINOGRAD, "Winograd's F(4, 3)"),
        (0, "integers", "f32", WINOGRAD, "Winograd's F(4, 3)"),
        (6, "normal", "f32 nhwc", WINOGRAD, "Winograd's F("),
        (6, "integers", "f32 nhwc", WINOGRAD, "Winograd's F("),
        (0, "normal", "tf32", TF32, "the inputs were read as TF32, truncated"),
        (1, "normal", "tf32 nhwc", CUT_TF32, "the inputs were read as TF32, truncated"),
        (3, "normal", "tf32 nhwc", TF32, "the inputs were read as TF32"),
    ],
)
def test_a_recorded_result(number: int, data: str, way: str, said: Arithmetic, words: str) -> None:
    """It is no honest f32, with a cause or hint that says what it is, and passes as that."""
    case, inputs = layer(number, data)
    result = recorded()[f"{LAYERS[number][0]}|{data}|{way}"]
    assert verify(case, inputs, result, said=said)["passed"]
    plain = verify(case, inputs, result)
    assert not plain["passed"]
    assert any(words in text for text in (*plain["hints"], *(cause["text"] for cause in plain["causes"])))


def test_cut_sums_are_seen() -> None:
    """A long sum of TF32 products is not as exact as one in f32: tensor cores cut it, and the hint says so."""
    case, inputs = layer(1, "normal")
    report = verify(case, inputs, recorded()["3x3 s2|normal|tf32 nhwc"], said=TF32)
    assert not report["passed"]
    assert "truncated f32 sums" in report["hints"][0]
