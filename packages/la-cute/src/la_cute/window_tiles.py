"""How calls of the window operators are cut into thread blocks: values, chosen by pure functions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from la_core.spec.decode_problem import StateLayout
from la_core.spec.window_problem import WindowProblem
from la_cute.decode_tiles import ACCESS_BYTES, KIB, MOST_VALUES, OVERLAP_ARCH, UNIT, ThreadLayout

TEAM = 8
"""Threads that share the product of a key with a query, and with K contiguous a row of a state."""

TEAMS_OF_WARP = 32 // TEAM

DRAFTS = 4
"""Drafts that verify works on side by side, compiled in: a row has any number of them."""


Eviction = Literal["", "evict_first", "evict_last"]

TOKEN_REGISTERS = 32
"""Registers of a thread for tokens on their way to the shared memory of a block of commit."""

TOKEN_BYTES = 16 * KIB
"""Shared memory of that block for their keys and values in float32."""


@dataclass(frozen=True)
class WindowTiles:
    """Shape of one thread block.

    Attributes
    ----------
    block_v
        Rows of V that it owns.
    num_warps
        Warps that share them.
    eviction
        When its states leave the L2 cache: like other lines, before them, or after them. `"evict_first"` is for states
        that are not written back, `"evict_last"` for those that are.
    tiles_of_block
        Times that a block of `commit` does so, with one tile behind the other.
    """

    block_v: int
    num_warps: int
    eviction: Eviction = ""
    tiles_of_block: int = 1


def window_threads(K: int, state_dtype: torch.dtype, state_layout: StateLayout, tiles: WindowTiles) -> ThreadLayout:
    """How the threads of a warp lie over the states of a block.

    With K contiguous a team of 8 threads has a row, so that a sum over K takes three shuffles for four rows.
    """
    run, lines_of_block = (K, tiles.block_v) if state_layout == "vk" else (tiles.block_v, K)
    vector = ACCESS_BYTES // state_dtype.itemsize
    lanes = min(TEAM if state_layout == "vk" else 32, run // vector)
    lines = 32 // lanes
    return ThreadLayout(vector, lanes, run // (lanes * vector), lines, lines_of_block // (tiles.num_warps * lines))


def places_class(places: int) -> int:
    """The number of places that a kernel for `places` of them is made for: 8, 16, 32, 64 or 128."""
    return max(8, 1 << (places - 1).bit_length())


def tokens_at_once(K: int, window_dtype: torch.dtype, tiles: WindowTiles) -> int:
    """Tokens that a block of commit moves to shared memory at a time: what fits there and, on the way, in registers."""
    elements = K + tiles.block_v * tiles.tiles_of_block
    in_registers = 4 * TOKEN_REGISTERS * 32 * tiles.num_warps // (elements * window_dtype.itemsize)
    return 1 << (min(in_registers, TOKEN_BYTES // (4 * elements)).bit_length() - 1)


_Choice = tuple[tuple[float, int, int, Eviction, int], ...]
"""Units up to which it holds; values of a state in one thread, warps of a block, eviction, tiles of a block."""

MOST_UNITS_WITH_OVERLAP = 2048
"""Of a call of `decode_window`."""

_DECODE: _Choice = (
    (64, 16, 4, "evict_last", 1),
    (128, 32, 2, "evict_last", 1),
    (512, 32, 4, "evict_first", 1),
    (2048, 64, 2, "evict_first", 1),
    (math.inf, 128, 4, "evict_first", 1),
)
_DECODE_WITH_OVERLAP: _Choice = (
    (8, 64, 2, "evict_first", 1),
    (64, 32, 2, "", 1),
    (128, 32, 4, "evict_first", 1),
    (MOST_UNITS_WITH_OVERLAP, 64, 2, "evict_first", 1),
)
_DECODE_16_BITS_WITH_OVERLAP: _Choice = (
    (4, 32, 2, "evict_first", 1),
    (8, 64, 2, "evict_first", 1),
    (16, 32, 1, "evict_last", 1),
    (32, 32, 4, "evict_first", 1),
    (64, 64, 2, "evict_first", 1),
    *_DECODE_WITH_OVERLAP[2:],
)
_VERIFY: _Choice = ((16, 16, 4, "", 1), (64, 32, 4, "", 1), (math.inf, 64, 4, "evict_first", 1))
_COMMIT: _Choice = (
    (64, 16, 4, "evict_last", 1),
    (2048, 64, 2, "evict_last", 1),
    (4096, 64, 2, "evict_last", 2),
    (math.inf, 64, 2, "evict_last", 4),
)


def choose_window_tiles(problem: WindowProblem) -> WindowTiles:
    """The tiles for a problem: how many values of a state a thread owns, in how many warps of a block.

    A unit is 64 KiB of states, a state of K = V = 128 in float32.

    A choice may follow the batch only where it changes no bit. With K contiguous a team sums each row of a state in
    every tile. With V contiguous the order of a sum depends on the tile, so one tile serves all batches.

    Large blocks are the better ones for large batches: a block goes through the keys of a window once, whatever rows it
    owns. Chosen on one H200, 2026-11, K = V = 128, states in float32 and bfloat16 with K contiguous, windows at random
    phases, of 7 and 15 places for `decode` and of 16 for the others, from times of these and other blocks; for
    `commit`, of states in all rows. `la-bench tune --op` measures them again.
    """
    if problem.state_layout == "kv":
        return _one_tile(problem, "evict_last" if problem.op == "commit" else "")
    units = _units(problem)
    choice = {"decode_window": _DECODE, "verify": _VERIFY, "commit": _COMMIT}[problem.op]
    if problem.op == "decode_window" and overlaps(problem):
        choice = _DECODE_WITH_OVERLAP if _state_dtype(problem).itemsize == 4 else _DECODE_16_BITS_WITH_OVERLAP
    return _tiles(problem, *next(tile for tile in choice if units <= tile[0])[1:])


def candidate_window_tiles(problem: WindowProblem) -> tuple[WindowTiles, ...]:
    """Every tile that the choice could be changed to without changing a bit; for measuring."""
    evictions: tuple[Eviction, ...] = ("", "evict_first", "evict_last")
    if problem.state_layout == "kv":
        return tuple(_one_tile(problem, eviction) for eviction in evictions)
    tiles = (
        _tiles(problem, values, warps, eviction, tiles_of_block)
        for values in (16, 32, 64, 128)
        for warps in (1, 2, 4, 8)
        for eviction in evictions
        for tiles_of_block in ((1, 2, 4) if problem.op == "commit" else (1,))
    )
    return tuple(dict.fromkeys(tiles))


def overlaps(problem: WindowProblem) -> bool:
    """Whether its kernel starts before the one before it has ended.

    A call of `decode` with many states gains nothing by it, and its threads wait for q, k and v behind the states.
    """
    if problem.op == "decode_window" and _units(problem) > MOST_UNITS_WITH_OVERLAP:
        return False
    return problem.overlap and problem.arch is not None and problem.arch >= OVERLAP_ARCH


def _units(problem: WindowProblem) -> float:
    return problem.L * problem.B * problem.H * problem.V * problem.K * _state_dtype(problem).itemsize / UNIT


def _state_dtype(problem: WindowProblem) -> torch.dtype:
    assert problem.state_dtype is not None, "only `advance` has no states, and no tiles"
    return problem.state_dtype


def _tiles(problem: WindowProblem, values: int, warps: int, eviction: Eviction, tiles_of_block: int) -> WindowTiles:
    """K contiguous: at most `values` in a thread, as many as fit `MOST_VALUES` registers, but four rows to each warp.

    A thread writes the output of one of its rows, of which it has no more than there are threads in a team.
    """
    most = MOST_VALUES
    if problem.op == "decode_window":
        most = min(MOST_VALUES * 4 // _state_dtype(problem).itemsize, problem.K)
    most = min(values, most)
    warps = min(warps, problem.V // TEAMS_OF_WARP)
    rows = max(warps * TEAMS_OF_WARP, min(32 * warps * most // problem.K, problem.V))
    return WindowTiles(rows, warps, eviction, min(tiles_of_block, problem.V // rows))


def _one_tile(problem: WindowProblem, eviction: Eviction) -> WindowTiles:
    """V contiguous: runs of at most 256 bytes, in as many warps as hold them, whatever the batch."""
    size = _state_dtype(problem).itemsize
    block_v = min(256 // size, 8 * 32 * MOST_VALUES // problem.K, problem.V)
    return WindowTiles(block_v, problem.K * block_v // (32 * MOST_VALUES), eviction)
