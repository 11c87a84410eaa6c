"""How a decode call is cut into programs: a value, chosen by a pure function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from la_core.spec.decode_problem import DecodeProblem

KIB = 1024
UNIT = 64 * KIB
"""A state of K = V = 128 in float32: work is counted in these."""

WARP_BYTES = 512
"""What a warp reads at a time, 16 bytes in each thread."""

MOST_ELEMENTS = 2048
"""Values of a state in one warp: 64 registers in each thread, beside what computing on them takes."""

OVERLAP_ARCH = (9, 0)
"""The first compute capability that can start a kernel while the one before it runs."""

Eviction = Literal["", "evict_first", "evict_last"]


@dataclass(frozen=True)
class DecodeTiles:
    """Shape of one program.

    Attributes
    ----------
    block_v
        Rows of V that it owns, a power of two.
    num_warps
        Warps that share them.
    eviction
        When its states leave the L2 cache: before other lines, after them, or like them. `"evict_last"` marks what is
        read only, so that it is still there when it is written back.
    """

    block_v: int
    num_warps: int
    eviction: Eviction = ""


def choose_decode_tiles(problem: DecodeProblem) -> DecodeTiles:
    """The tiles for a problem: how many bytes of state a program owns, in how many warps.

    Small batches want many programs in flight, large ones long runs of memory and lines that stay in the L2 cache from
    the read to the write. A unit is 64 KiB of states, a state of K = V = 128 in float32. Measured by `la-bench tune` on
    one H200, 2026-11, K = V = 128, device time over cold slots against the best of :func:`candidate_tiles`
    (`..`: not measured):

    ============ ========== ============================ ============= ================================= =============
    pool         units      without overlap              of the best   with overlap                      of the best
    ============ ========== ============================ ============= ================================= =============
    float32,     up to 16   8 KiB, 8 warps, evict last   1.00 to 1.01  8 KiB, 8 warps, evict last        1.00 to 1.01
    K contiguous up to 64   2 KiB, 1 warp                1.00          8 KiB, 8 warps, evict last        1.00 to 1.06
    ..           up to 128  2 KiB, 1 warp                1.00          4 KiB, 1 warp, evict last         1.00
    ..           up to 256  4 KiB, 1 warp                1.01          4 KiB, 1 warp                     1.01
    ..           up to 1024 8 KiB, 8 warps, evict last   1.00          8 KiB, 8 warps, evict last        1.00
    ..           up to 2048 8 KiB, 4 warps, evict last   1.00          8 KiB, 8 warps, evict last        1.00
    ..           above      8 KiB, 4 warps, evict last   1.00          8 KiB, 1 warp, evict last         1.00
    16 bits,     up to 32   8 KiB, 8 warps, evict last   1.00 to 1.07  8 KiB, 8 warps, evict last        1.04
    K contiguous up to 64   2 KiB, 1 warp                ..            8 KiB, 8 warps, evict last        ..
    ..           up to 128  2 KiB, 1 warp                1.01          4 KiB, 1 warp, evict last         1.00
    ..           up to 256  4 KiB, 1 warp                1.01          4 KiB, 1 warp                     1.02
    ..           above      4 KiB, 1 warp, evict last    1.00 to 1.01  4 KiB, 1 warp, evict last         1.00
    float32,     up to 512  32 KiB, 4 warps              1.00 to 1.03  32 KiB, 4 warps                   ..
    V contiguous above      32 KiB, 4 warps, evict last  1.00          32 KiB, 4 warps, evict last       ..
    16 bits,     up to 512  32 KiB, 8 warps              ..            32 KiB, 8 warps                   ..
    V contiguous above      32 KiB, 8 warps, evict last  ..            32 KiB, 8 warps, evict last       ..
    ============ ========== ============================ ============= ================================= =============

    A choice may follow the batch only where it changes no bit. With K contiguous one warp sums each row of a state in
    every tile: a row longer than 512 bytes therefore gets programs of one warp, since more would share it. With V
    contiguous the order of a sum depends on the tile, so one tile serves all batches.
    """
    units = problem.state_bytes / UNIT
    if problem.state_layout == "kv":
        return _one_tile(problem, "evict_last" if units > 512 else "")
    # Programs of one warp are cut at 64 registers of states a thread: 8 KiB in float32, 4 KiB in 16 bits.
    wide = problem.state_dtype.itemsize == 4
    overlap = problem.overlap and problem.arch is not None and problem.arch >= OVERLAP_ARCH
    if units <= (64 if overlap else 16 if wide else 32):
        return _tiles(problem, 8 * KIB, 8, "evict_last")
    if units <= 128:
        return _tiles(problem, 4 * KIB, 1, "evict_last") if overlap else _tiles(problem, 2 * KIB, 1, "")
    if units <= 256:
        return _tiles(problem, 4 * KIB, 1, "")
    if not wide:
        return _tiles(problem, 8 * KIB, 1, "evict_last")
    if overlap:
        return _tiles(problem, 8 * KIB, 8 if units <= 2048 else 1, "evict_last")
    return _tiles(problem, 8 * KIB, 8 if units <= 1024 else 4, "evict_last")


def candidate_tiles(problem: DecodeProblem) -> tuple[DecodeTiles, ...]:
    """Every tile that the choice could be changed to without changing a bit; for measuring."""
    evictions: tuple[Eviction, ...] = ("", "evict_first", "evict_last")
    if problem.state_layout == "kv":
        return tuple(_one_tile(problem, eviction) for eviction in evictions)
    tiles = (
        _tiles(problem, kib * KIB, warps, eviction)
        for kib in (1, 2, 4, 8, 16)
        for warps in (1, 2, 4, 8)
        for eviction in evictions
    )
    return tuple(dict.fromkeys(tiles))


def next_power_of_two(n: int) -> int:
    """The smallest power of two that is at least `n >= 1`."""
    return 1 << (n - 1).bit_length()


def _tiles(problem: DecodeProblem, program: int, warps: int, eviction: Eviction) -> DecodeTiles:
    """K contiguous: `program` bytes of state, shared by at most `warps` warps that read 512 bytes at a time."""
    block_k = next_power_of_two(problem.K)
    row = block_k * problem.state_dtype.itemsize
    if row > WARP_BYTES:
        warps = 1
    rows = min(program // row, warps * MOST_ELEMENTS // block_k, next_power_of_two(problem.V))
    rows = max(1, rows)
    return DecodeTiles(rows, max(1, min(warps, rows * row // WARP_BYTES)), eviction)


def _one_tile(problem: DecodeProblem, eviction: Eviction) -> DecodeTiles:
    """V contiguous: runs of at most 256 bytes, in as many warps as hold them, whatever the batch."""
    block_k = next_power_of_two(problem.K)
    rows = min(256 // problem.state_dtype.itemsize, 8 * MOST_ELEMENTS // block_k, next_power_of_two(problem.V))
    return DecodeTiles(rows, max(1, block_k * rows // MOST_ELEMENTS), eviction)
