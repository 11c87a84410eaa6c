"""What the kernels of the window operators are compiled for, as values. Imports no compiler."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch

from la_core.spec.decode_problem import StateLayout
from la_core.spec.window_problem import WindowProblem
from la_cute.decode_compile_key import architecture
from la_cute.window_tiles import WindowTiles, overlaps, places_class


class WindowCompileKey(NamedTuple):
    """What changes the machine code of `decode_window`, `verify` or `commit`, and nothing else.

    No batch, pool, heads, layers, tokens, stride, scale, cursor or address.
    """

    op: Literal["decode_window", "verify", "commit"]
    arch: str
    """Such as `sm_90a`."""
    io_dtype: torch.dtype | None
    window_dtype: torch.dtype
    state_dtype: torch.dtype
    out_dtype: torch.dtype | None
    offsets_dtype: torch.dtype
    counts_dtype: torch.dtype | None
    """Dtype of `draft_lengths` or `accepted`; None without such a tensor."""
    places: int
    """The most places of a window, with one for the new token of `decode_window`; 0 for `commit`, which takes any."""
    K: int
    V: int
    state_layout: StateLayout
    aligned: bool
    """Whether rows of states start at multiples of 16 bytes, and those of q, k, v and the window at multiples of 4
    elements."""
    tiles: WindowTiles
    overlap: bool

    def compile(self, options: str = "") -> Any:
        """Compile it; see :mod:`la_cute.window_compile`."""
        from la_cute import window_compile

        return window_compile.compile_window(self, options)


class CursorsCompileKey(NamedTuple):
    """What changes the machine code of `advance`."""

    arch: str
    offsets_dtype: torch.dtype
    counts_dtype: torch.dtype | None
    """Dtype of `accepted`; None if it is a number."""

    @property
    def op(self) -> str:
        """The operator, as in la-core."""
        return "advance"

    def compile(self, options: str = "") -> Any:
        """Compile it; see :mod:`la_cute.cursors_compile`."""
        from la_cute import cursors_compile

        return cursors_compile.compile_cursors(self, options)


def window_compile_key(problem: WindowProblem, tiles: WindowTiles, *, aligned: bool) -> WindowCompileKey:
    """The key for a problem on its GPU."""
    assert problem.op != "advance"
    assert problem.window_dtype is not None
    assert problem.state_dtype is not None
    return WindowCompileKey(
        op=problem.op,
        arch=architecture(problem.arch),
        io_dtype=problem.io_dtype,
        window_dtype=problem.window_dtype,
        state_dtype=problem.state_dtype,
        out_dtype=problem.out_dtype,
        offsets_dtype=problem.offsets_dtype,
        counts_dtype=problem.counts_dtype,
        places=0 if problem.op == "commit" else places_class(problem.N + (problem.op == "decode_window")),
        K=problem.K,
        V=problem.V,
        state_layout=problem.state_layout,
        aligned=aligned,
        tiles=tiles,
        # What comes before a commit are the tokens that it brings in.
        overlap=problem.op != "commit" and overlaps(problem),
    )


def cursors_compile_key(problem: WindowProblem) -> CursorsCompileKey:
    """The key of `advance` for a problem on its GPU."""
    return CursorsCompileKey(architecture(problem.arch), problem.offsets_dtype, problem.counts_dtype)
