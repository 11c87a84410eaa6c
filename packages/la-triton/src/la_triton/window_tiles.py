"""How a call of a window operator is cut into programs: a value, chosen by a pure function."""

from __future__ import annotations

from dataclasses import dataclass, replace

from la_core.spec.window_problem import WindowProblem
from la_triton.decode_tiles import Eviction, next_power_of_two

LINE_BYTES = 128
"""Of a row of a state, what neighbouring lanes of `verify` read at once."""

WINDOW_ELEMENTS = 64
"""Most keys of a window in one thread, in registers."""

LEAST_K = 2
"""Elements of K in a program at least: Triton 3.6 does not compile an axis of one next to a mask on it."""

CURSOR_ROWS = 128
"""Rows in one program of `advance`."""


@dataclass(frozen=True)
class WindowTiles:
    """Shape of one program.

    Attributes
    ----------
    block_v
        Rows of V that it owns, a power of two.
    num_warps
        Warps that share them.
    inner_k
        Elements of K, a power of two, over which lanes lie before they lie along V; 1 with V contiguous.
    eviction
        When its states leave the L2 cache; see :class:`la_triton.decode_tiles.DecodeTiles`.
    step
        Tokens that are worked on together where there are many: those that come into a state, or drafts (up to 4).
    """

    block_v: int
    num_warps: int
    inner_k: int
    eviction: Eviction = ""
    step: int = 4


def choose_window_tiles(problem: WindowProblem) -> WindowTiles:
    """The tiles for a problem.

    Sums over K and over the places of a window are taken in an order that depends on the tile. So one tile serves all
    batches: it follows sizes and dtypes alone.
    """
    if problem.op == "advance":
        return WindowTiles(1, CURSOR_ROWS // 32, 1)
    if problem.op == "decode_window":
        return decode_window_tiles(problem, block_v=32, num_warps=8)
    if problem.op == "commit":
        return _large_tiles(problem, problem.K, elements=16)
    # One draft at a time, 32 values of a state in a thread: on an H200, 2026-11, two thirds of the time of two drafts.
    return replace(_large_tiles(problem, LINE_BYTES // _bytes(problem), elements=32), step=1)


def candidate_window_tiles(problem: WindowProblem) -> tuple[WindowTiles, ...]:
    """Shapes that an operator with states could be given for all batches; for measuring."""
    step = choose_window_tiles(problem).step
    tiles = (
        replace(decode_window_tiles(problem, block_v, num_warps, inner), step=step)
        for block_v in (16, 32, 64)
        for num_warps in (4, 8)
        for inner in (problem.K, LINE_BYTES // _bytes(problem))
    )
    return tuple(dict.fromkeys(tiles))


def padded_k(K: int) -> int:
    """Elements of K in a program, of which those behind K are masked."""
    return max(LEAST_K, next_power_of_two(K))


def decode_window_tiles(problem: WindowProblem, block_v: int, num_warps: int, inner: int | None = None) -> WindowTiles:
    """Tiles near the asked ones that fit a problem's sizes: no larger than V, no more keys in a thread than allowed."""
    block_k = padded_k(problem.K)
    block_v = min(block_v, next_power_of_two(problem.V))
    elements = max(next_power_of_two(problem.N), block_v) * block_k
    num_warps = min(8, max(num_warps, elements // (32 * WINDOW_ELEMENTS)))
    return WindowTiles(block_v, num_warps, _inner(problem, inner or block_k), step=2)


def _large_tiles(problem: WindowProblem, inner: int, elements: int) -> WindowTiles:
    """Programs of eight warps, with so many values of a state in a thread as far as V allows."""
    block_k = padded_k(problem.K)
    num_warps = 8
    rows = max(1, num_warps * 32 * elements // block_k)
    return WindowTiles(min(rows, next_power_of_two(problem.V)), num_warps, _inner(problem, inner))


def _inner(problem: WindowProblem, inner: int) -> int:
    return min(next_power_of_two(inner), padded_k(problem.K)) if problem.state_layout == "vk" else 1


def _bytes(problem: WindowProblem) -> int:
    """Of one element of a state."""
    return 4 if problem.state_dtype is None else problem.state_dtype.itemsize
