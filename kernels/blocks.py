"""How much is worked on at a time: the sizes of blocks, slabs, chunks, bands and units, by the caches that hold them.

Two tables, because a size may decide more than speed:

* `SUMS` cuts sums, or chooses how they are formed. Another value gives other bits, so these depend on the target's path
  alone: never on the machine's own caches, its load or the number of workers. Whoever changes one changes results.
* `STEPS` cuts everything else: packing, the order in which sums that never meet are visited, units, looks at whether to
  stop. No value of it changes a bit (`tests/kernels/test_blocks.py`), so it may depend on the machine.

Not here: tiles and vectors, which the instructions decide (`kernels.target`, `kernels.emit`), bounds of tables, which
stand beside these, and what chooses between layouts (`kernels.costs`).

Compiled code has what it reads of these built in, so a module that compiles them gives them a name of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernels.target import target

__all__ = ["CACHES", "STEPS", "SUMS", "Caches", "Steps", "Sums"]

_F32 = 4


@dataclass(frozen=True)
class Caches:
    """Bytes of the caches that the sizes below are made for: nominal ones, the same on every machine of a path."""

    l1: int
    """Of data. AVX2 comes with 32 KiB; AVX-512 with 32 (Zen 4) or 48 KiB, and 48 KiB are assumed."""

    l2: int = 512 << 10
    """A second-level cache as small as they come among processors of today (Zen 2 and 3)."""

    l2_dots: int = 1 << 20
    """The same among those with products of bf16 (Cooper Lake, Zen 4 and 5; 2 MiB on Sapphire Rapids)."""

    l3: int = 4 << 20
    """A processor's share of the last cache (4 MiB on Zen 4)."""


CACHES = Caches(l1=(48 if target().registers == 32 else 32) << 10)


@dataclass(frozen=True)
class Sums:
    """Sizes that decide bits: the order of a sum, or which of several ways forms it."""

    # weight gradients on register tiles (`kernels.gradient.tiles.schedule`)

    block_positions: int = CACHES.l1 // 2 // (2 * target().lanes * _F32)
    """Positions of one register-tile call: panel lines of two vectors for each fill half of L1, and the scalars of some
    rows the other half."""

    strided_block_bytes: int = 40 << 10
    """L1 that a block's cache lines may take where strided scalars draw whole ones into it."""

    slab_bytes: int = CACHES.l2
    """Packed bytes that one slab should not pass where it can be cut without packing anything twice, and what the
    pixels of one block take where both tensors are read where they lie, lanes being groups."""

    most_slab_bytes: int = 12 << 20
    """Packed bytes that one slab may take where cutting it costs a repeated border, or it can't be cut: beyond L2,
    within a worker's room of 64 MiB."""

    lane_slab_bytes: int = CACHES.l2 * 3 // 8
    """Packed bytes of a slab where lanes are groups: every value is read once or twice only, so it should stay in L2;
    a third more where cutting it costs a repeated border."""

    slab_macs: int = 250_000_000
    """Multiply-adds of one slab: some milliseconds, after which a worker looks whether it should stop."""

    least_slab_macs: int = 8_000_000
    """Those that make up for laying a slab out."""

    line_positions: int = 64
    """Positions of a line that are not cut apart, so that vectors and walks are long (forward operations as well), and
    those of the smallest block: sums are formed in registers over up to 128, and added to memory at its end."""

    # chunks of both kinds of weight gradients: what is added up by itself, and may be shared out

    chunks: int = 32
    """Parts of a reduction that is shared out by pixels; a power of two, summed as a balanced tree."""

    large_chunks: int = 8
    """The same for accumulators that do not fit a cache: each level of the tree has its own copy of them."""

    chunk_macs: int = 10_000_000
    """Multiply-adds of a chunk at the least: below it nobody shares it out."""

    chunk_positions: int = 2048
    """Pixels that a chunk has at the least: adding chunks up costs a pass over the gradient each."""

    cached_chunk_positions: int = 512
    """The same where L2 nearly holds the accumulators: more chunks lose fewer digits."""

    # weight gradients by Winograd (`kernels.gradient.winograd`)

    winograd_tiles: int = 128
    """The most tiles in a slab: the panels of one vertical product, 64 channels on each side, take a quarter of L2. A
    chunk has twice as many or more."""

    winograd_chunked_sums: int = 8 * 128 * 128
    """The most channel pairs times chunks: each pair has 64 bytes of sums in every chunk, and chunks are added up."""

    # forward operations by Winograd (`kernels.forward.winograd`)

    winograd_weights_bytes: int = 64 << 20
    """Transformed weights of a forward operation that `auto` chooses, in memory that the workers share."""

    # products of bf16 (`kernels.gradient.dots`, `kernels.forward.amx`)

    dot_slab_bytes: int = CACHES.l2_dots
    """Packed bytes of one slab where it can be cut, of the narrow tensor in it, which every pair of a channel and a tap
    reads again, and of the src of a band on AMX."""

    walk_pixels: int = 512
    """Pixels of one walk at the most: those of 32 channels leave room in the first cache, or in the second."""

    staged_pixels: int = 320
    """Those of a walk of staged rows, which should stay in the first cache."""

    # forward operations (`kernels.forward`)

    flush_steps: int = 64
    """Products that are summed in a register before the sum is added to a second one: longer sums lose more digits.
    Where the result is bf16, in which that does not show, they are 16 times as many."""

    weights_bytes: int = 24 << 20
    """Packed weights of one pass, or sums of one image where products are scattered: a part of a worker's room of 64
    MiB. More dst channels are done one part after another, and AMX refuses what has no room for a pair of blocks."""

    # sums of a bias (`kernels.bias`)

    bias_chunk: int = 1 << 18
    """The least values of a chunk, of which there are up to `chunks`. Other units have at least twice as many."""

    bias_piece: int = 1 << 21
    """Values of a channel that are summed at once, and values between two looks at whether to stop."""

    bias_row: int = 256
    """Values of the lines that short rows of channels are joined to."""

    # forward operations on AMX (`kernels.forward.amx`)

    staged_positions: int = 2048
    """The most dst positions of a band: their sums take 256 KiB, a part of the second cache."""

    batch_steps: int = 16
    """Steps that are summed in tile registers: the weights of that many stay in the first cache, or in the second."""


@dataclass(frozen=True)
class Steps:
    """Sizes that decide speed alone."""

    # units, which workers share

    unit_macs: int = 20_000_000
    """Multiply-adds beyond which a problem is shared out: a unit with half as many is worth its message to a worker.
    Workers get several units only if each has twice as many."""

    most_forward_macs: int = 2_000_000_000
    """Those of a unit of a forward operation, about 40 ms, where more units pack src or weights more than once."""

    unit_sums_bytes: int = 24 << 20
    """The most that the sums of one unit take, or the tiles of a slab with their sums: a part of a worker's 64 MiB."""

    shared_sums_bytes: int = 1 << 20
    """Gradients up to this size are shared out by pixels, larger ones by channels: each chunk adds a pass over them. So
    many partial sums make adding them up worth one more unit."""

    most_shared_bytes: int = 64 << 20
    """Partial sums of larger ones, where their channels alone are fewer than the workers."""

    winograd_slab_tiles: int = 64
    """The most tiles of a forward operation that are transformed at a time: all transformed weights are read for each
    slab, and those of many channels are read from memory."""

    winograd_unit_weights: int = 1 << 18
    """Weights that make transforming them worth one more unit."""

    # from one look at whether to stop to the next

    batch_macs: int = 100_000_000
    """Multiply-adds, a few milliseconds."""

    # bands of a forward operation

    band_bytes: int = CACHES.l2 * 3 // 8
    """Src of one band, as long as it has enough pixels, or what else is visited in turn: scalars that all lane blocks
    take, packed weights of a line of dst. It stays in another part of L2."""

    band_pixels: int = 512
    """Dst pixels that make up for reading large weights once more; small ones stay in L2."""

    reach_pixels: int = 1 << 13
    """Dst pixels of a band, where one of them reaches as many src positions."""

    # visits and packing

    together_channels: int = 64
    """Adjacent channels that are packed at a time, where a group has fewer: whole lines of memory."""

    together_lanes: int = 256
    """Groups whose pixels are summed before the next groups: lines of src that several taps meet stay in L1."""

    strip_positions: int = 16
    """Positions that a few panels take in turn while they are in L1."""


SUMS = Sums()
STEPS = Steps()
