"""The tensors of one unit of a forward operation: some images, groups, dst channels and dst positions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import prod
from typing import Any

from kernels.arena import address, arena_address
from kernels.dtypes import KINDS
from kernels.emit.compiler import Records, row_of, values_of
from kernels.forward.records import Call, Data, Filter, Pass
from kernels.plan import Stop, Storage
from kernels.problem import ConvProblem, data_steps, storage_dtype, wrapped

__all__ = ["Row", "Share", "Span"]

Span = tuple[int, int]
Row = tuple[Any, ...]


class Share(ABC):
    """Some images, groups, dst channels and dst positions: what every way of computing them needs."""

    def __init__(self, problem: ConvProblem, part: Sequence[int]) -> None:
        self.problem, self.dims = problem, problem.dims
        images, (self.g0, self.g1), self.channels, *spatial = zip(part[::2], part[1::2], strict=True)
        self.spans = [images, *spatial]  # of dst positions
        self.kind = KINDS[problem.dtype]
        self.floats = dict.fromkeys(("panels", "source", "products", "sums"), 0)
        dims, size = self.dims, storage_dtype(problem.dtype).itemsize
        strides = [min(stride, max(1, wide)) for stride, wide in zip(dims.strides, dims.wide, strict=True)]
        self.strides, self.src_strides = ([1, 1, 1], strides) if dims.gathers else (strides, [1, 1, 1])

        def steps(group: int, *others: int) -> list[int]:
            """Return bytes: to the first group, to the next one, and others."""
            some: list[int] = wrapped(size * step for step in (self.g0 * group, group, *others)).tolist()
            return some

        def data(shape: Sequence[int], channels: int, inside: int, spatial: tuple[int, int, int]) -> Row:
            *others, channel = data_steps(problem.data_format, channels, spatial)
            start, group, *strides, channel = steps(inside * channel, *others, channel)
            return values_of(
                Data, start=start, nbytes=size * prod(shape), group=group, strides=strides, channel=channel
            )

        group, wide, narrow, tap = problem.weights_strides
        dst_step, src_step = (narrow, wide) if dims.gathers else (wide, narrow)
        out = dims.dst_channels
        self.src = data(problem.src_shape, problem.src_channels, dims.src_channels, dims.src)
        self.dst = data(problem.output_shape, problem.dst_channels, out, dims.dst)
        start, *some = steps(group, dst_step, src_step, tap)
        names = "group", "dst_channel", "src_channel", "tap"
        nbytes = size * prod(problem.weights_shape)
        self.weights = values_of(Filter, start=start, nbytes=nbytes, **dict(zip(names, some, strict=True)))
        self.near = bool(self.src[-1] == size)  # a pixel's channels follow each other
        self.near_dst = bool(self.dst[-1] == size)

    def one_pass(self, group: int, groups: int, channels: int, first: int = 0) -> Records:
        """Return a pass of some groups from `group` on and some of their dst channels, from the `first` on."""
        operands = {"src": self.src, "weights": self.weights, "dst": self.dst}
        bias = storage_dtype(self.problem.dtype).itemsize * ((self.g0 + group) * self.dims.dst_channels + first)
        one = row_of(Pass, groups=groups, channels=channels, bias=bias, **operands)
        for name in operands:
            one[name]["start"] += group * one[name]["group"]
        for name, step in (("weights", "dst_channel"), ("dst", "channel")):
            one[name]["start"] += first * one[name][step]
        return one

    def call(self, inputs: Sequence[Storage], output: Storage) -> Records:
        """Return the addresses of a call: its tensors, and scratch memory of the sizes in `floats`."""
        return row_of(
            Call,
            src=address(inputs[0]),
            weights=address(inputs[1]),
            bias=address(inputs[2]) if len(inputs) > 2 else 0,
            dst=address(output),
            **{name: arena_address(name, floats) for name, floats in self.floats.items()},
        )

    @abstractmethod
    def run(self, inputs: Sequence[Storage], output: Storage, stop: Stop) -> bool:
        """Compute the share; False when `stop` said so."""
