"""Plant bugs in a kernel, and measure how `convgrad check` finds, names and reduces them.

    python -m benchmarks.planted [NAME ...] [--seeds 5] [--seconds 60] [--held-out] [--c]

Each kernel is that of the tests, or `planted.c`, with one bug. A check goes on for `--after` seconds after its first
finding. It names the bug if the first fault of its report does, in its line, a cause, a hint or the place.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

import convgrad
from convgrad._check.cases import Case
from convgrad._check.judge import Judge
from convgrad._check.process import KernelProcess
from convgrad._check.report import new
from convgrad._check.run import check, chosen
from tests.convgrad.check.kernels import right

Array = npt.NDArray[Any]
Given = dict[str, Any]
Bug = Callable[[Given], Array]

PLANTED: dict[str, tuple[str, Bug]] = {}
"""Name of a bug: a pattern of what names it, and the kernel."""

HELD_OUT: set[str] = set()
"""Bugs that were written when the check was finished."""

C_BUGS = {1: "pads|padding|shifted", 2: "stride", 3: "dilation", 4: "dst channel|zero|unwritten|held before",
          5: "group", 6: "image", 7: "tap", 8: "row|pixel y|y = ", 9: "crashed|SIG", 10: "crashed|beyond|SIG",
          11: "bf16|bits", 12: "channel"}  # fmt: skip


def run(given: Given, **changed: Any) -> Array:
    """Compute the right result of a call with some arguments changed."""
    return right(**{name: value for name, value in (given | changed).items() if name not in ("pads_end", "out")})


def sizes(given: Given) -> tuple[int, int, int]:
    """Return the batch, and the channels of src and dst in a group."""
    groups = given["groups"]
    return len(given["src"]), given["src"].shape[1] // groups, given["diff_dst"].shape[1] // groups


def without(values: Array, axis: int, at: int = -1) -> Array:
    """Return a copy with zeros at an index of an axis."""
    copy = values.copy()
    place: Any = (*(slice(None),) * axis, at)
    copy[place] = 0
    return copy


def only_if(condition: Callable[[Given], bool], broken: Bug) -> Bug:
    """Return a kernel with a bug in the calls of a condition."""
    return lambda given: broken(given) if condition(given) else run(given)


def plant(name: str, names: str, condition: Callable[[Given], bool], broken: Bug) -> None:
    """Add a bug: what names it, in which calls it shows, and what these return."""
    PLANTED[name] = names, only_if(condition, broken)


def narrowed(values: Array, dtype: Any) -> Array:
    """Round to a dtype and back."""
    with np.errstate(all="ignore"):
        return values.astype(dtype).astype(np.float32)


def split(given: Given, dtype: Any) -> Array:
    """Add the images in a narrow dtype."""
    total: Any = np.float32(0)
    for at in range(len(given["src"])):
        part = run(given, src=given["src"][at : at + 1], diff_dst=given["diff_dst"][at : at + 1])
        total = narrowed(total + narrowed(part, dtype), dtype)
    return np.broadcast_to(total, given["weights_shape"]).astype(np.float32)


def cleared(values: Array, bits: int) -> Array:
    """Clear the last bits of f32."""
    return (np.ascontiguousarray(values).view(np.uint32) & np.uint32(2**32 - 2**bits)).view(np.float32)


def flushed(values: Array) -> Array:
    """Replace subnormals by zero."""
    return np.where(np.abs(values) < np.float32(2.0**-126), np.float32(0), values)


def always(_: Given) -> bool:
    """Whether a bug shows: always."""
    return True


calls: list[Any] = [0, {}]


def cached(given: Given) -> Array:
    """Return the first result for the same attributes again."""
    key = (given["src"].shape, given["diff_dst"].shape, *[given[n] for n in ("strides", "dilations", "pads_begin")])
    if key not in calls[1]:
        calls[1][key] = run(given)
    found: Array = calls[1][key].copy()
    return found


def left_over(given: Given) -> Array:
    """Add to what the last call of the same shape left in a workspace, if it was large."""
    found = run(given)
    if prod(given["weights_shape"]) < 64:
        return found
    last = calls[1].get(given["weights_shape"], 0)
    calls[1][given["weights_shape"]] = found[-1:] * 0.5
    result: Array = found + last
    return result


def shuffled(given: Given) -> Array:
    """Add the images in f32, in an order that changes."""
    order = np.random.default_rng().permutation(len(given["src"]))
    parts = [run(given, src=given["src"][at : at + 1], diff_dst=given["diff_dst"][at : at + 1]) for at in order]
    return sum(parts, np.zeros(given["weights_shape"], np.float32))


def now_and_then(given: Given) -> Array:
    """Be off by a unit in each 29th call."""
    calls[0] += 1
    found = run(given)
    return np.nextafter(found, np.float32(np.inf)) if calls[0] % 29 == 0 else found


def outside(given: Given) -> Array:
    """Read four bytes behind src."""
    last = given["src"].ctypes.data + given["src"].nbytes
    ctypes.string_at(last, 4)
    return run(given)


def unwritten(given: Given, tail: int) -> Array:
    """Leave the last channels of dst unwritten."""
    found, result = run(given), np.empty(given["weights_shape"], np.float32)
    whole = len(found) // tail * tail
    result[:whole] = found[:whole]
    return result


def wide(given: Given, axis: int = -1) -> int:
    """Return the size of src along an axis."""
    return int(given["src"].shape[axis])


def first_group(given: Given) -> Array:
    """Read the channels of the first group in all groups."""
    first = given["src"][:, : sizes(given)[1]]
    return run(given, src=np.concatenate([first] * given["groups"], 1))


def raises(_: Given) -> Array:
    """Raise an error."""
    raise RuntimeError("no kernel for this dilation")


def out_zero(given: Given, at: Any) -> Array:
    """Set some elements of the result to zero."""
    found = run(given)
    found[at] = 0
    return found


def ones(given: Given) -> tuple[int, ...]:
    """Return ones for each axis."""
    return (1,) * len(given["strides"])


def row(given: Given) -> int:
    """Return the axis of rows in src."""
    return len(given["src"].shape) - 2


def column(given: Given) -> int:
    """Return the axis of columns."""
    return len(given["src"].shape) - 1


def uneven(given: Given) -> bool:
    """Whether the pads at both ends differ."""
    return bool(given["pads_begin"] != given["pads_end"])


plant("pads_exchanged", "pads|shifted", uneven, lambda g: run(g, pads_begin=g["pads_end"]))
plant("pads_from_4", "pads|shifted|padding", lambda g: max(g["pads_begin"]) > 3,
      lambda g: run(g, pads_begin=tuple(min(3, p) for p in g["pads_begin"])))  # fmt: skip
plant("dilation_ignored", "dilation", always, lambda g: run(g, dilations=ones(g)))
plant("dilation_from_16", "dilation", lambda g: max(g["dilations"]) >= 16, lambda g: run(g, dilations=ones(g)))
plant("stride_of_first_axis", "stride", always, lambda g: run(g, strides=g["strides"][:1] * len(g["strides"])))
plant("stride_6", "stride|src.*wrong|every", lambda g: 6 in g["strides"],
      lambda g: run(g, strides=tuple(5 if s == 6 else s for s in g["strides"])))  # fmt: skip
plant("stride_from_7", "stride", lambda g: max(g["strides"]) > 6, lambda g: run(g, strides=ones(g)))
plant("last_row_of_odd", "row|pixel y|y = |tap y", lambda g: g["src"].ndim > 3 and wide(g, -2) % 2 == 1,
      lambda g: run(g, src=without(g["src"], row(g))))  # fmt: skip
plant("last_column_of_4n_3", "column|pixel x|x = |tap x", lambda g: wide(g) % 4 == 3,
      lambda g: run(g, src=without(g["src"], column(g))))  # fmt: skip
plant("column_256", "column|pixel x|x = |tap x", lambda g: wide(g) > 256,
      lambda g: run(g, src=without(g["src"], column(g), 256)))  # fmt: skip
plant("dst_channel_32", "dst channel", lambda g: sizes(g)[2] == 33, lambda g: out_zero(g, 32))
plant("src_channel_64", "src channel", lambda g: sizes(g)[1] > 64, lambda g: out_zero(g, (slice(None), 64)))
plant("dst_channels_129", "dst channel", lambda g: sizes(g)[2] > 128, lambda g: out_zero(g, slice(128, None)))
plant("src_channel_254", "src channel", lambda g: sizes(g)[1] == 255, lambda g: out_zero(g, (slice(None), 254)))
plant("group_of_more_than_12", "group", lambda g: sizes(g)[1] > 12 and g["groups"] > 1, first_group)
plant(
    "groups_beyond_16",
    "group|channel",
    lambda g: g["groups"] > 16,
    lambda g: out_zero(g, slice(16 * sizes(g)[2], None)),
)
plant("tap_of_kernel_beyond_8", "tap", lambda g: g["weights_shape"][-1] > 8, lambda g: out_zero(g, (..., -1)))
plant("kernel_reversed_from_15", "tap|revers", lambda g: g["weights_shape"][-1] >= 15, lambda g: run(g)[..., ::-1])
plant("image_of_batch_from_10", "image", lambda g: sizes(g)[0] >= 10, lambda g: run(g, src=without(g["src"], 0)))
plant("image_16", "image", lambda g: sizes(g)[0] > 16, lambda g: run(g, src=without(g["src"], 0, 16)))
plant("part_of_long_sum", "image|pixel|y = |x = ", lambda g: prod(g["diff_dst"].shape) // g["diff_dst"].shape[1] > 4096,
      lambda g: run(g, diff_dst=without(g["diff_dst"], column(g))))  # fmt: skip
plant("last_bit", "bit|digit|truncat", always, lambda g: cleared(run(g), 1))
plant("negative_zero", "-0|sign|zero", always, lambda g: np.where(run(g) == 0, np.float32(-0.0), run(g)))
plant("nan_swallowed", "NaN", always, lambda g: np.nan_to_num(run(g), nan=0.0, posinf=np.inf, neginf=-np.inf))
plant("inf_clamped", "Inf", always, lambda g: np.clip(run(g), -3.4e38, 3.4e38))
plant("subnormal_inputs", "subnormal|flushed", always, lambda g: run(g, src=flushed(g["src"])))
plant("subnormal_results", "subnormal|flushed|zero", always, lambda g: flushed(run(g)))
plant("unwritten_tail", "held before|unwritten|repeat", always, lambda g: unwritten(g, 4))
plant("bf16_sums", "bf16", always, lambda g: split(g, ml_dtypes.bfloat16))
plant("f16_sums", "f16", always, lambda g: split(g, np.float16))
plant("bf16_inputs", "bf16", always, lambda g: run(g, src=narrowed(g["src"], ml_dtypes.bfloat16)))
plant("tf32_cut", "TF32|tf32", always, lambda g: run(g, src=cleared(g["src"], 13), diff_dst=cleared(g["diff_dst"], 13)))
plant("read_beyond", "crash|SIG", lambda g: wide(g) % 2 == 1 and sizes(g)[1] > 4, outside)
plant("four_features", "dst channel", lambda g: max(g["strides"]) > 1 and max(g["dilations"]) > 1 and g["groups"] > 1
      and uneven(g), lambda g: out_zero(g, -1))  # fmt: skip
plant("four_sizes", "src channel", lambda g: sizes(g)[0] > 2 and max(g["weights_shape"][2:]) > 3 and sizes(g)[1] > 8
      and max(g["pads_begin"]) > 1, lambda g: out_zero(g, (slice(None), -1)))  # fmt: skip
plant("cached", "zero|doubled|repeat|wrong", always, cached)
plant("left_over", "repeat", always, left_over)
plant("order_of_images", "repeat", always, shuffled)
plant("now_and_then", "repeat", always, now_and_then)
plant("raises", "no kernel", lambda g: max(g["dilations"]) > 4 and max(g["weights_shape"][2:]) > 3, raises)


def patches(given: Given) -> bool:
    """Whether some patches do not overlap, and are padded."""
    kernel = given["weights_shape"][2:]
    return any(k == s > 1 and p for k, s, p in zip(kernel, given["strides"], given["pads_begin"], strict=True))


def far_padded(given: Given) -> bool:
    """Whether some pads at the beginning are longer than the kernel."""
    axes = zip(given["weights_shape"][2:], given["dilations"], given["pads_begin"], strict=True)
    return any(p > (k - 1) * d + 1 for k, d, p in axes)


def toward_zero(values: Array, exact: Array) -> Array:
    """Round to f32 toward zero."""
    larger = np.abs(values.astype(np.float64)) > np.abs(exact)
    return np.where(larger, np.nextafter(values, np.float32(0)), values)


def exact_sums(given: Given) -> Array:
    """Return the sums in float64."""
    return run(given, src=given["src"].astype(np.float64), diff_dst=given["diff_dst"].astype(np.float64))


def loses_image(given: Given) -> Array:
    """Leave out the last image in each seventh call."""
    calls[0] += 1
    return run(given, src=without(given["src"], 0)) if calls[0] % 7 == 0 else run(given)


seen = set(PLANTED)
plant("last_column_of_dst_8n_5", "column|pixel x|x = ",
      lambda g: g["diff_dst"].shape[-1] % 8 == 5 and g["weights_shape"][-1] > 2,
      lambda g: run(g, diff_dst=without(g["diff_dst"], column(g))))  # fmt: skip
plant("patches_not_padded", "pads|padding|shifted", patches,
      lambda g: run(g, pads_begin=(0,) * len(g["strides"])))  # fmt: skip
plant("taps_of_large_squares_swapped", "swapped|axes|tap", lambda g: len(g["strides"]) == 2
      and g["weights_shape"][2] == g["weights_shape"][3] > 4, lambda g: np.swapaxes(run(g), 2, 3))  # fmt: skip
plant("multiplier_of_many_groups", "channel|group", lambda g: g["groups"] > 20 and sizes(g)[1:] == (1, 2),
      lambda g: out_zero(g, slice(1, None, 2)))  # fmt: skip
plant(
    "pads_beyond_kernel",
    "pads|padding|shifted",
    far_padded,
    lambda g: run(g, pads_begin=tuple(min(p, k) for p, k in zip(g["pads_begin"], g["weights_shape"][2:], strict=True))),
)
plant("depth_dilated", "dilation|tap z", lambda g: len(g["strides"]) == 3 and g["dilations"][0] > 1,
      lambda g: run(g, dilations=(1, *g["dilations"][1:])))  # fmt: skip
plant("src_channels_96_to_112", "src channel", lambda g: 96 <= sizes(g)[1] <= 112,
      lambda g: out_zero(g, (slice(None), slice(96, None))))  # fmt: skip
plant("scaled_from_three_images", "factor|times|scale|bits", lambda g: sizes(g)[0] > 2,
      lambda g: run(g) * np.float32(1 + 2**-12))  # fmt: skip
plant("rounded_toward_zero", "bit|toward|truncat|round", always, lambda g: toward_zero(run(g), exact_sums(g)))
plant("image_lost_now_and_then", "repeat|image", lambda g: sizes(g)[0] > 4, loses_image)
HELD_OUT |= PLANTED.keys() - seen


def kernel(name: str) -> Callable[..., Array]:
    """Return a kernel with a bug, or with none."""

    def function(
        src: Array, diff_dst: Array, weights_shape: Any, strides: Any, dilations: Any, pads_begin: Any, pads_end: Any,
        groups: int,
    ) -> Array:  # fmt: skip
        given = dict(locals())
        given.pop("name", None)
        with np.errstate(all="ignore"):
            return PLANTED[name][1](given).astype(np.float32)

    return function


globals().update({name: kernel(name) for name in PLANTED})


class _EnoughError(Exception):
    pass


def tried(kernel: str, seed: int, seconds: float, after: float, client: convgrad.Client) -> dict[str, Any]:
    """Check a kernel until some seconds after the first finding; return the report."""
    with KernelProcess(kernel, takes={"ops": ["ConvolutionBackwardWeights"], "dtypes": ["f32"]}, limit=20) as process:
        data = new(kernel, "numpy", seed, process.takes, {})

        def enough(*_: object) -> None:
            if data["faults"] and time.monotonic() - begun > data["faults"][0]["after"] + after:
                raise _EnoughError

        begun = time.monotonic()
        with suppress(_EnoughError):
            check(process, Judge(client), data, choice=chosen((), ()), seconds=seconds, cases=None,
                  shrinking=0.15 * seconds, on_progress=enough)  # fmt: skip
    return data


def named(data: dict[str, Any], pattern: str) -> bool:
    """Whether the first fault of a report names the bug."""
    fault = data["faults"][0]
    lines = [fault["kind"], fault["text"]]
    if fault["report"]:
        report = fault["report"]
        lines += [*report["hints"], *[cause["text"] for cause in report["causes"]]]
        lines += [report["where"]["text"]] if report["where"] else []
    return re.search(pattern, "\n".join(lines)) is not None


def main() -> None:
    """Run the bugs and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    for flag, default in (("--seeds", 5), ("--seconds", 60.0), ("--after", 5.0)):
        parser.add_argument(flag, type=type(default), default=default)
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument("--c", action="store_true")
    options = parser.parse_args()
    bugs = {name: (names, f"{__file__}:{name}") for name, (names, _) in PLANTED.items()
            if (name in HELD_OUT) == options.held_out}  # fmt: skip
    with convgrad.local() as client, tempfile.TemporaryDirectory() as folder:
        if options.c:
            bugs = {f"C {number}": (names, compiled(number, folder)) for number, names in C_BUGS.items()}
        rows = []
        print(f"{'bug':24} found  named  seconds    case  faults      macs  pixels  text")
        for name in options.names or bugs:
            names, place = bugs[name]
            reports = [tried(place, seed, options.seconds, options.after, client) for seed in range(options.seeds)]
            found = [data for data in reports if data["faults"]]
            shown = sum(named(data, names) for data in found)
            rows.append((len(found), shown, len(reports)))
            line = f"{name:24} {len(found)}/{len(reports):<5} {shown}/{len(reports):<4}"
            if found:
                first = [data["faults"][0] for data in found]
                numbers = [fault["first"]["number"] for fault in first]
                smallest = [Case.from_json(fault["smallest"]).problem for fault in first]
                line += (
                    f" {median(fault['after'] for fault in first):7.1f} {median(numbers):7g}"
                    f" {median(len(data['faults']) for data in found):7g} {median(p.macs for p in smallest):9g}"
                    f" {median(prod(p.wide) for p in smallest):7g}  {first[0]['kind']}: {first[0]['text'][:90]}"
                )
            else:
                line += f" {'':7} {median(len(data['cases']) for data in reports):7g} cases"
            print(line, flush=True)
        total = [sum(column) for column in zip(*rows, strict=True)]
        print(f"{total[0]} of {total[2]} runs found the bug, {total[1]} named it")


def compiled(number: int, folder: str) -> str:
    """Compile the C kernel with a bug."""
    path = f"{folder}/bug{number}.so"
    cc, include = shutil.which("cc") or "cc", Path(convgrad.__file__).parent
    source = Path(__file__).with_suffix(".c")
    subprocess.run([cc, "-shared", "-fPIC", "-O2", f"-DBUG={number}", f"-I{include}", "-o", path, source], check=True)
    return path


if __name__ == "__main__":
    main()
