"""How a decode call is cut into programs: a value, chosen by a pure function."""

from __future__ import annotations

from dataclasses import dataclass

from la_core.spec.decode_problem import DecodeProblem

KIB = 1024
UNIT = 64 * KIB
"""A state of K = V = 128 in float32: work is counted in these."""


MOST_ELEMENTS = 2048
"""Values of a state in one program: 64 registers in each thread of a warp, beside what computing on them takes."""


@dataclass(frozen=True)
class DecodeTiles:
    """Shape of one program.

    Attributes
    ----------
    block_v
        Rows of V that it owns, a power of two.
    num_warps
        Warps that share them.
    evict_first
        Whether its states leave the L2 cache first.
    """

    block_v: int
    num_warps: int
    evict_first: bool = False


def choose_decode_tiles(problem: DecodeProblem) -> DecodeTiles:
    """The tiles for a problem: how many bytes of state a program owns, in how many warps.

    Small batches want many programs in flight, large ones long runs of memory. Measured on one H200, 2026-11, float32
    states, K = V = 128, K contiguous, device time over cold slots against the best of all tiles tried (2 to 16 rows, 1
    and 2 warps, with and without eviction); a unit is one state of 64 KiB, so there are H * B of them.

    ============== ======================== ==================== ============================ ====================
    units          without overlap          times the best       with overlap                 times the best
    ============== ======================== ==================== ============================ ====================
    up to 32       2 KiB, 1 warp            1.00 to 1.03         2 KiB, 1 warp, evict first   1.00
    up to 64       2 KiB, 1 warp            1.00                 4 KiB, 2 warps, evict first  1.00
    up to 128      2 KiB, 1 warp            1.00                 4 KiB, 1 warp, evict first   1.01
    up to 1024     8 KiB, 1 warp            1.00 to 1.01         4 KiB, 1 warp, evict first   1.00 to 1.01
    up to 4096     4 KiB, 2 warps           1.00                 4 KiB, 1 warp, evict first   1.00
    above          4 KiB, 2 warps           1.00                 4 KiB, 1 warp                1.00
    ============== ======================== ==================== ============================ ====================

    Each row of a state is summed by one warp in every tile, so that the choice changes no bit. V contiguous has not
    been measured by itself: it takes the same bytes, but pieces of at least 16 values.
    """
    units = problem.state_bytes / UNIT
    if problem.overlap:
        program, warps, evict_first = 4 * KIB, 1, units <= 4096
        if units <= 32:
            program = 2 * KIB
        elif units <= 64:
            warps = 2
    else:
        program, warps, evict_first = 4 * KIB, 2, False
        if units <= 128:
            program, warps = 2 * KIB, 1
        elif units <= 1024:
            program, warps = 8 * KIB, 1
    block_k = next_power_of_two(problem.K)
    most = max(1, MOST_ELEMENTS // block_k)
    rows = min(most, program // (block_k * problem.state_dtype.itemsize))
    if problem.state_layout == "kv":
        rows = max(rows, min(most, 16))
    return DecodeTiles(max(1, min(rows, next_power_of_two(problem.V))), warps, evict_first)


def next_power_of_two(n: int) -> int:
    """The smallest power of two that is at least `n >= 1`."""
    return 1 << (n - 1).bit_length()
