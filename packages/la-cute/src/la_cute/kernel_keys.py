"""What kernels are found by: one type of key for each way to compile one."""

from __future__ import annotations

from typing import TypeAlias

from la_core.spec.decode_problem import DecodeProblem
from la_core.spec.window_problem import WindowProblem
from la_cute.decode_compile_key import DecodeCompileKey, decode_compile_key
from la_cute.decode_tiles import choose_decode_tiles
from la_cute.window_compile_key import CursorsCompileKey, WindowCompileKey, cursors_compile_key, window_compile_key
from la_cute.window_tiles import choose_window_tiles

KernelKey: TypeAlias = DecodeCompileKey | WindowCompileKey | CursorsCompileKey
"""A key has an architecture, knows its operator, and compiles itself."""


def keys_of_problem(problem: DecodeProblem | WindowProblem) -> tuple[KernelKey, ...]:
    """The kernels of a problem, for aligned and for other addresses."""
    if isinstance(problem, DecodeProblem):
        tiles = choose_decode_tiles(problem)
        return tuple(decode_compile_key(problem, tiles, aligned=aligned) for aligned in (True, False))
    if problem.op == "advance":
        return (cursors_compile_key(problem),)
    window_tiles = choose_window_tiles(problem)
    return tuple(window_compile_key(problem, window_tiles, aligned=aligned) for aligned in (True, False))
