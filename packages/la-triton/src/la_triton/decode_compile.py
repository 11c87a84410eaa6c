"""Compiling the decode kernel: a function of a small key, without tensors, without a launch, without a GPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from triton.compiler import CompiledKernel

from la_core.spec.decode_problem import DecodeProblem, StateLayout
from la_triton.decode_kernel import decode_kernel
from la_triton.decode_tiles import OVERLAP_ARCH, DecodeTiles, next_power_of_two
from la_triton.kernel_compile import compile_kernel
from la_triton.kernel_parts import ROWS_PER_Z


class DecodeCompileKey(NamedTuple):
    """What changes the machine code, and nothing else: no batch, pool, heads, stride, scale or address."""

    arch: int
    """Compute capability without the dot, such as 90."""
    io_dtype: torch.dtype
    state_dtype: torch.dtype
    out_dtype: torch.dtype
    offsets_dtype: torch.dtype
    K: int
    V: int
    state_layout: StateLayout
    aligned: bool
    tiles: DecodeTiles
    overlap: bool


def decode_compile_key(problem: DecodeProblem, arch: int, tiles: DecodeTiles, *, aligned: bool) -> DecodeCompileKey:
    """The key for a problem on an architecture. Overlap needs the hardware of sm_90."""
    return DecodeCompileKey(
        arch=arch,
        io_dtype=problem.io_dtype,
        state_dtype=problem.state_dtype,
        out_dtype=problem.out_dtype,
        offsets_dtype=problem.offsets_dtype,
        K=problem.K,
        V=problem.V,
        state_layout=problem.state_layout,
        aligned=aligned,
        tiles=tiles,
        overlap=problem.overlap and divmod(arch, 10) >= OVERLAP_ARCH,
    )


def kernel_constants(key: DecodeCompileKey, *, emulate_rounding: bool = False) -> dict[str, Any]:
    """Compile-time arguments of `decode_kernel`, in the order of its signature."""
    return {
        "K": key.K,
        "V": key.V,
        "BLOCK_K": next_power_of_two(key.K),
        "BLOCK_V": key.tiles.block_v,
        "K_CONTIGUOUS": key.state_layout == "vk",
        "ALIGNED": key.aligned,
        "LOAD_EVICTION": key.tiles.eviction,
        "STORE_EVICTION": key.tiles.eviction if key.tiles.eviction == "evict_first" else "",
        "OVERLAP": key.overlap,
        "EMULATE_ROUNDING": emulate_rounding,
        "ROWS_PER_Z": ROWS_PER_Z,
        "IO_PIECE": 4 * key.io_dtype.itemsize,
    }


def compile_decode(key: DecodeCompileKey) -> CompiledKernel:
    """Compile for the key's architecture, or take the result from Triton's cache on disk."""
    pointers = {
        "p_q": key.io_dtype,
        "p_k": key.io_dtype,
        "p_v": key.io_dtype,
        "p_s": key.state_dtype,
        "p_offsets": key.offsets_dtype,
        "p_decay": torch.float32,
        "p_o": key.out_dtype,
    }
    constants = kernel_constants(key)
    return compile_kernel(
        decode_kernel, key.arch, pointers, constants, num_warps=key.tiles.num_warps, overlap=key.overlap
    )
