"""What a decode kernel is compiled for, as a value. Imports no compiler: finding a kernel that is there needs none."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from la_core.spec.decode_problem import DecodeProblem, StateLayout
from la_cute.decode_tiles import OVERLAP_ARCH, DecodeTiles

ARCHES = {"sm_80": (8, 0), "sm_90a": (9, 0), "sm_100a": (10, 0), "sm_120a": (12, 0)}
"""Architectures that the kernels are checked and prebuilt for, and their compute capability."""


class DecodeCompileKey(NamedTuple):
    """What changes the machine code, and nothing else: no batch, pool, heads, stride, scale or address."""

    arch: str
    """Such as `sm_90a`."""
    io_dtype: torch.dtype
    state_dtype: torch.dtype
    out_dtype: torch.dtype
    offsets_dtype: torch.dtype
    K: int
    V: int
    state_layout: StateLayout
    aligned: bool
    """Whether rows of states start at multiples of 16 bytes, and those of q, k and v at multiples of 4 elements."""
    tiles: DecodeTiles
    overlap: bool

    @property
    def op(self) -> str:
        """The operator, as in la-core."""
        return "decode"

    def compile(self, options: str = "") -> Any:
        """Compile it; see :mod:`la_cute.decode_compile`."""
        from la_cute import decode_compile

        return decode_compile.compile_decode(self, options)


def architecture(capability: tuple[int, int] | None) -> str:
    """The compiler's name of a compute capability, such as `sm_90a`."""
    major, minor = capability or (0, 0)
    # From Hopper on, code for one architecture alone; before, there is no such thing.
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


def decode_compile_key(problem: DecodeProblem, tiles: DecodeTiles, *, aligned: bool) -> DecodeCompileKey:
    """The key for a problem on its GPU."""
    return DecodeCompileKey(
        arch=architecture(problem.arch),
        io_dtype=problem.io_dtype,
        state_dtype=problem.state_dtype,
        out_dtype=problem.out_dtype,
        offsets_dtype=problem.offsets_dtype,
        K=problem.K,
        V=problem.V,
        state_layout=problem.state_layout,
        aligned=aligned,
        tiles=tiles,
        overlap=problem.overlap and (problem.arch or (0, 0)) >= OVERLAP_ARCH,
    )
