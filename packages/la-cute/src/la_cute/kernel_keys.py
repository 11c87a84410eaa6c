"""What kernels are found by: one type of key for each way to compile one."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

from la_core.spec.decode_problem import DecodeProblem
from la_core.spec.window_problem import WindowProblem
from la_cute.decode_compile_key import DecodeCompileKey, decode_compile_key
from la_cute.decode_tiles import DecodeTiles, choose_decode_tiles
from la_cute.window_compile_key import CursorsCompileKey, WindowCompileKey, cursors_compile_key, window_compile_key
from la_cute.window_tiles import WindowTiles, choose_window_tiles

KernelKey: TypeAlias = DecodeCompileKey | WindowCompileKey | CursorsCompileKey
"""A key has an architecture, knows its operator, and compiles itself."""


def keys_of_problem(problem: DecodeProblem | WindowProblem) -> tuple[KernelKey, ...]:
    """The kernels of a problem, for aligned and for other addresses."""
    if isinstance(problem, DecodeProblem):
        return tuple(key_of_decode(problem, aligned=aligned) for aligned in (True, False))
    if problem.op == "advance":
        return (cursors_compile_key(problem),)
    return tuple(key_of_window(problem, aligned=aligned) for aligned in (True, False))


def key_of_decode(problem: DecodeProblem, tiles: DecodeTiles | None = None, *, aligned: bool) -> DecodeCompileKey:
    """The kernel for addresses of one kind; other `tiles` than the chosen ones are for measuring.

    Addresses that are not aligned are rare, so one kernel serves all batches at them: with the tiles of a single state,
    which leave the most registers, and without overlap. More would be built ahead of time for every kind of state.
    """
    if tiles is None:
        problem = problem if aligned else replace(problem, B=1, H=1, overlap=False)
        tiles = choose_decode_tiles(problem)
    return decode_compile_key(problem, tiles, aligned=aligned)


def key_of_window(problem: WindowProblem, tiles: WindowTiles | None = None, *, aligned: bool) -> WindowCompileKey:
    """The same for an operator of the KV window that has states."""
    if tiles is None:
        problem = problem if aligned else replace(problem, L=1, B=1, H=1, overlap=False)
        tiles = choose_window_tiles(problem)
    return window_compile_key(problem, tiles, aligned=aligned)
