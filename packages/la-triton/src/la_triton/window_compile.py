"""Compiling the kernels of the window operators: functions of a small key, without tensors, launch or GPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from triton.compiler import CompiledKernel

from la_core.spec.decode_problem import StateLayout
from la_core.spec.window_problem import WindowOp, WindowProblem
from la_triton.commit_kernel import commit_kernel
from la_triton.cursors_kernel import cursors_kernel
from la_triton.decode_tiles import OVERLAP_ARCH, next_power_of_two
from la_triton.kernel_compile import compile_kernel
from la_triton.kernel_parts import ROWS_PER_Z
from la_triton.verify_kernel import verify_kernel
from la_triton.window_decode_kernel import window_decode_kernel
from la_triton.window_tiles import CURSOR_ROWS, WindowTiles, padded_k

KERNELS: dict[WindowOp, Any] = {
    "decode_window": window_decode_kernel,
    "verify": verify_kernel,
    "commit": commit_kernel,
    "advance": cursors_kernel,
}


class WindowCompileKey(NamedTuple):
    """What changes the machine code, and nothing else: no batch, pool, heads, layers, tokens, stride, scale, cursor.

    What an operator has no argument for is None, 0 or False.
    """

    op: WindowOp
    arch: int
    """Compute capability without the dot, such as 90."""
    io_dtype: torch.dtype | None
    window_dtype: torch.dtype | None
    state_dtype: torch.dtype | None
    out_dtype: torch.dtype | None
    offsets_dtype: torch.dtype
    counts_dtype: torch.dtype | None
    K: int
    V: int
    places: int
    """Of a window, rounded up to a power of two, where they are worked on side by side."""
    state_layout: StateLayout
    aligned: bool
    tiles: WindowTiles
    overlap: bool


def window_compile_key(problem: WindowProblem, arch: int, tiles: WindowTiles, *, aligned: bool) -> WindowCompileKey:
    """The key for a problem on an architecture.

    Overlap needs the hardware of sm_90. What writes what the next kernel may read before its wait starts without: then
    that kernel starts when it has ended.
    """
    overlaps = problem.op in ("decode_window", "verify")
    return WindowCompileKey(
        op=problem.op,
        arch=arch,
        io_dtype=problem.io_dtype,
        window_dtype=problem.window_dtype,
        state_dtype=problem.state_dtype,
        out_dtype=problem.out_dtype,
        offsets_dtype=problem.offsets_dtype,
        counts_dtype=problem.counts_dtype,
        K=problem.K,
        V=problem.V,
        places=next_power_of_two(problem.N) if overlaps else 0,
        state_layout=problem.state_layout,
        aligned=aligned,
        tiles=tiles,
        overlap=overlaps and problem.overlap and divmod(arch, 10) >= OVERLAP_ARCH,
    )


def window_constants(key: WindowCompileKey, *, emulate_rounding: bool = False) -> dict[str, Any]:
    """Compile-time arguments of the operator's kernel, in the order of its signature."""
    eviction = key.tiles.eviction
    constants = {
        "K": key.K,
        "V": key.V,
        "PLACES": key.places,
        "BLOCK_K": padded_k(max(1, key.K)),
        "INNER_K": key.tiles.inner_k,
        "BLOCK_V": key.tiles.block_v,
        "K_CONTIGUOUS": key.state_layout == "vk",
        "ALIGNED": key.aligned,
        "HAS_COUNTS": key.counts_dtype is not None,
        "LOAD_EVICTION": eviction,
        "STORE_EVICTION": eviction if eviction == "evict_first" else "",
        "OVERLAP": key.overlap,
        "EMULATE_ROUNDING": emulate_rounding,
        "ROWS_PER_Z": ROWS_PER_Z,
        "IO_PIECE": 4 * _itemsize(key.io_dtype),
        "WINDOW_PIECE": 4 * _itemsize(key.window_dtype),
        "STEP": key.tiles.step,
        "BLOCK_B": CURSOR_ROWS,
    }
    return {name: constants[name] for name in KERNELS[key.op].arg_names if name in constants}


def compile_window(key: WindowCompileKey) -> CompiledKernel:
    """Compile for the key's architecture, or take the result from Triton's cache on disk."""
    pointers = {
        "p_q": key.io_dtype,
        "p_k": key.io_dtype,
        "p_v": key.io_dtype,
        "p_s": key.state_dtype,
        "p_offsets": key.offsets_dtype,
        "p_decay": torch.float32,
        "p_wk": key.window_dtype,
        "p_wv": key.window_dtype,
        "p_start": torch.int32,
        "p_length": torch.int32,
        "p_counts": key.counts_dtype or key.offsets_dtype,
        "p_o": key.out_dtype,
    }
    return compile_kernel(
        KERNELS[key.op],
        key.arch,
        {name: dtype for name, dtype in pointers.items() if dtype is not None},
        window_constants(key),
        num_warps=key.tiles.num_warps,
        overlap=key.overlap,
    )


def _itemsize(dtype: torch.dtype | None) -> int:
    return 0 if dtype is None else dtype.itemsize
