"""Nearly valid inputs: a plain mutator, for runs whose inputs are fixed in advance."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

__all__ = ["LONGEST", "mutants"]

LONGEST = 4096
"""Longest input in bytes; larger ones only take time."""


def mutants(seeds: Sequence[bytes], words: Sequence[bytes], count: int, *, seed: int) -> Iterator[bytes]:
    """Yield `count` inputs: the seeds themselves, then mutations of them, the same for the same `seed`."""
    rng = random.Random(seed)
    for number in range(count):
        data = bytearray(seeds[number % len(seeds)][:LONGEST])
        for _ in range(0 if number < len(seeds) else 1 << rng.randrange(3)):
            _change(rng, data, seeds, words)
        yield bytes(data[:LONGEST])


def _change(rng: random.Random, data: bytearray, seeds: Sequence[bytes], words: Sequence[bytes]) -> None:
    at = rng.randrange(len(data) + 1)
    end = min(len(data), at + (1 << rng.randrange(8)))
    match rng.randrange(7):
        case 0:
            data[at : at + 1] = rng.randbytes(1)
        case 1:
            del data[at:end]
        case 2:
            data[at:at] = data[at:end]
        case 3:
            data[at:at] = rng.choice(words)
        case 4:
            data[at:end] = rng.choice(words)
        case 5:
            data[rng.randrange(2) :][:1] = rng.randbytes(1)
        case _:
            other = rng.choice(seeds)
            data[at:] = other[rng.randrange(len(other) + 1) :]
