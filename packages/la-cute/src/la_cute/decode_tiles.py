"""How a decode call is cut into thread blocks: values, chosen by pure functions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from la_core.spec.decode_problem import DecodeProblem, StateLayout

KIB = 1024
UNIT = 64 * KIB
"""A state of K = V = 128 in float32: work is counted in these."""

ACCESS_BYTES = 16
"""What a thread reads of a state at a time."""

IO_PIECE = 4
"""Elements of q, k or v that a thread reads at a time, where it needs as many."""

WARP_BYTES = 32 * ACCESS_BYTES

MOST_VALUES = 64
"""Values of a state in one thread, each a register, beside what computing on them takes."""

OVERLAP_ARCH = (9, 0)
"""The first compute capability that can start a kernel while the one before it runs."""

Eviction = Literal["", "evict_last"]


@dataclass(frozen=True)
class DecodeTiles:
    """Shape of one thread block.

    Attributes
    ----------
    block_v
        Rows of V that it owns.
    num_warps
        Warps that share them.
    eviction
        When its states leave the L2 cache: like other lines, or after them. `"evict_last"` marks what is read only, so
        that it is still there when it is written back.
    store_first
        Whether it stores its states before it sums its outputs, or behind that.
    spread_sums
        Whether the lanes of a warp share out the sums of its rows, which takes fewer shuffles, or each takes all.
    crowded
        Whether it is made for some more blocks than run at a time, with K contiguous and several warps: the block's
        outputs are stored together, and with overlap the next kernel is let in when states have been asked for, not
        first of all.
    """

    block_v: int
    num_warps: int
    eviction: Eviction = ""
    store_first: bool = False
    spread_sums: bool = False
    crowded: bool = False


class ThreadLayout(NamedTuple):
    """How the threads of a warp lie over the states of a block.

    A line is a run of memory: a row of K with K contiguous, `block_v` values of V with V contiguous.
    """

    vector: int
    """Values in one access of 16 bytes."""
    lanes: int
    """Threads side by side on a line."""
    repeats: int
    """Accesses of a thread on a line."""
    lines: int
    """Lines that a warp covers at a time, `passes` lines apart."""
    passes: int
    """Lines of a thread, one behind the other."""


def thread_layout(K: int, state_dtype: torch.dtype, state_layout: StateLayout, tiles: DecodeTiles) -> ThreadLayout:
    """The layout for a state of K columns."""
    run, lines_of_block = (K, tiles.block_v) if state_layout == "vk" else (tiles.block_v, K)
    vector = ACCESS_BYTES // state_dtype.itemsize
    lanes = min(32, run // vector)
    lines = 32 // lanes
    return ThreadLayout(vector, lanes, run // (lanes * vector), lines, lines_of_block // (tiles.num_warps * lines))


class _Cut(NamedTuple):
    """Tiles for calls of up to so many units: bytes of a block, its warps, and the rest as in :class:`DecodeTiles`."""

    units: float
    block: int
    num_warps: int
    eviction: Eviction
    store_first: bool = False
    spread_sums: bool = False
    crowded: bool = False


_WITHOUT_OVERLAP = (
    _Cut(64, 8 * KIB, 4, "evict_last", store_first=True, spread_sums=True),
    _Cut(128, 16 * KIB, 4, "", store_first=True),
    _Cut(256, 8 * KIB, 1, ""),
    _Cut(512, 2 * KIB, 1, "evict_last"),
    _Cut(2048, 8 * KIB, 8, "evict_last", crowded=True),
    _Cut(math.inf, 8 * KIB, 1, "evict_last"),
)
_WITH_OVERLAP = (
    _Cut(16, 4 * KIB, 8, "evict_last"),
    _Cut(64, 8 * KIB, 8, "evict_last"),
    _Cut(128, 8 * KIB, 4, "evict_last", spread_sums=True),
    _Cut(256, 8 * KIB, 1, "", store_first=True),
    _Cut(512, 4 * KIB, 4, "evict_last", spread_sums=True, crowded=True),
    _Cut(2048, 8 * KIB, 8, "evict_last", spread_sums=True, crowded=True),
    _Cut(math.inf, 8 * KIB, 1, "evict_last"),
)
_WITH_OVERLAP_LARGE_SLOTS = (
    *_WITH_OVERLAP[:2],
    _Cut(128, 4 * KIB, 1, "evict_last", store_first=True),
    _WITH_OVERLAP[3],
    _Cut(math.inf, 8 * KIB, 8, "evict_last", crowded=True),
)
_16_BITS_WITHOUT_OVERLAP = (
    *_WITHOUT_OVERLAP[:2],
    _Cut(512, 8 * KIB, 4, "evict_last", crowded=True),
    _Cut(math.inf, 4 * KIB, 1, "evict_last"),
)
_16_BITS_WITH_OVERLAP = (
    *_WITH_OVERLAP_LARGE_SLOTS[:3],
    _Cut(512, 4 * KIB, 4, "evict_last", crowded=True),
    _16_BITS_WITHOUT_OVERLAP[-1],
)

LARGE_SLOT = 2 << 20
"""Bytes of states in a slot from which on it counts as large. Measured with slots of 0.5, 1, 2 and 4 MiB."""


def choose_decode_tiles(problem: DecodeProblem) -> DecodeTiles:
    """The tiles for a problem: how many bytes of state a block owns, in how many warps.

    A unit is 64 KiB of states, a state of K = V = 128 in float32. Measured by `la-bench tune --backend cute` on one
    H200, 2026-11, K = V = 128, float32 states with K contiguous, device time over cold slots against the best of
    :func:`candidate_tiles`, 8 heads as long as 512 rows suffice; for large slots `--heads 64`:

    ============ ================================== ============= ================================== =============
    units        without overlap                    of the best   with overlap                       of the best
    ============ ================================== ============= ================================== =============
    up to 16     8 KiB, 4 warps, evict last, sf, ss 1.00          4 KiB, 8 warps, evict last         1.00 to 1.01
    up to 64     8 KiB, 4 warps, evict last, sf, ss 1.00 to 1.01  8 KiB, 8 warps, evict last         1.00 to 1.01
    up to 128    16 KiB, 4 warps, sf                1.01          8 KiB, 4 warps, evict last, ss     1.00
    up to 256    8 KiB, 1 warp                      1.00          8 KiB, 1 warp, sf                  1.01
    up to 512    2 KiB, 1 warp, evict last          1.00          4 KiB, 4 warps, evict last, ss, c  1.00
    up to 2048   8 KiB, 8 warps, evict last, c      1.00          8 KiB, 8 warps, evict last, ss, c  1.00
    above        8 KiB, 1 warp, evict last          1.00          8 KiB, 1 warp, evict last          1.00
    large slots:
    up to 128    as above                                         4 KiB, 1 warp, evict last, sf      1.00
    above 256    as above                                         8 KiB, 8 warps, evict last, c      1.00
    ============ ================================== ============= ================================== =============

    `sf` is `store_first`, `ss` is `spread_sums`, `c` is `crowded`, and a large slot has :data:`LARGE_SLOT` bytes of
    states or more. Other sizes take the tiles of as many bytes, not tuned, and so do states of 16 bits up to 128 units,
    with overlap those of large slots. Beyond, measured in bfloat16, with overlap for 64 heads too:

    ============ ================================== ============= ================================== =============
    units        without overlap                    of the best   with overlap                       of the best
    ============ ================================== ============= ================================== =============
    up to 512    8 KiB, 4 warps, evict last, c      1.00 to 1.01  4 KiB, 4 warps, evict last, c      1.00 to 1.01
    above        4 KiB, 1 warp, evict last          1.00          4 KiB, 1 warp, evict last          1.00 to 1.01
    ============ ================================== ============= ================================== =============

    A choice may follow the batch only where it changes no bit. With K contiguous one warp sums each row of a state in
    every tile. With V contiguous the order of a sum depends on the tile, so one tile serves all batches.
    """
    units = problem.state_bytes / UNIT
    overlap = problem.overlap and problem.arch is not None and problem.arch >= OVERLAP_ARCH
    if problem.state_layout == "kv":
        return _one_tile(problem, "evict_last" if overlap or units > 512 else "")
    return _tiles(problem, *next(cut for cut in _cuts(problem, overlap) if units <= cut.units)[1:])


def _cuts(problem: DecodeProblem, overlap: bool) -> tuple[_Cut, ...]:
    """K contiguous: the tiles that there are for batches of any size."""
    if problem.state_dtype.itemsize < 4:
        return _16_BITS_WITH_OVERLAP if overlap else _16_BITS_WITHOUT_OVERLAP
    if not overlap:
        return _WITHOUT_OVERLAP
    slot_bytes = problem.H * problem.V * problem.K * problem.state_dtype.itemsize
    return _WITH_OVERLAP_LARGE_SLOTS if slot_bytes >= LARGE_SLOT else _WITH_OVERLAP


def candidate_tiles(problem: DecodeProblem) -> tuple[DecodeTiles, ...]:
    """Every tile that the choice could be changed to without changing a bit; for measuring."""
    evictions: tuple[Eviction, ...] = ("", "evict_last")
    if problem.state_layout == "kv":
        return tuple(_one_tile(problem, eviction) for eviction in evictions)
    tiles = (
        _tiles(problem, kib * KIB, warps, eviction, store_first, spread_sums, crowded)
        for kib in (2, 4, 8, 16)
        for warps in (1, 4, 8)
        for eviction in evictions
        for store_first, crowded in ((False, False), (True, False), (False, True))
        for spread_sums in (False, True)
        if warps > 1 or not crowded
    )
    return tuple(dict.fromkeys(tiles))


def _tiles(
    problem: DecodeProblem,
    block: int,
    warps: int,
    eviction: Eviction,
    store_first: bool,
    spread_sums: bool,
    crowded: bool,
) -> DecodeTiles:
    """K contiguous: `block` bytes of state at most, in `warps` warps at most, at least one row a line of each warp."""
    row = problem.K * problem.state_dtype.itemsize
    rows_at_once = max(1, WARP_BYTES // row)
    most = MOST_VALUES * 32 // problem.K
    warps = min(warps, problem.V // rows_at_once)
    rows = max(warps * rows_at_once, min(block // row, warps * most, problem.V))
    return DecodeTiles(rows, warps, eviction, store_first, spread_sums, crowded)


def _one_tile(problem: DecodeProblem, eviction: Eviction) -> DecodeTiles:
    """V contiguous: runs of at most 256 bytes, in as many warps as hold them, whatever the batch."""
    block_v = min(256 // problem.state_dtype.itemsize, 8 * 32 * MOST_VALUES // problem.K, problem.V)
    return DecodeTiles(block_v, problem.K * block_v // (32 * MOST_VALUES), eviction, store_first=True)
