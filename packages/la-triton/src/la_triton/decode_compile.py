"""Compiling the decode kernel: a function of a small key, without tensors, without a launch, without a GPU."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from la_core.spec.decode_problem import DecodeProblem, StateLayout
from la_triton.decode_kernel import ROWS_PER_Z, decode_kernel
from la_triton.decode_tiles import OVERLAP_ARCH, DecodeTiles, next_power_of_two

_POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
_SCALARS = {"scale": "fp32", "B": "i32", "H": "i32", "group": "i32", "NEVER": "i32"}
"""Types of the run-time numbers; all others are i64."""


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
    constants = kernel_constants(key)
    pointers = {
        "p_q": key.io_dtype,
        "p_k": key.io_dtype,
        "p_v": key.io_dtype,
        "p_s": key.state_dtype,
        "p_offsets": key.offsets_dtype,
        "p_decay": torch.float32,
        "p_o": key.out_dtype,
    }
    signature = {}
    for name in decode_kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in pointers:
            signature[name] = _POINTERS[pointers[name]]
        else:
            signature[name] = _SCALARS.get(name, "i64")
    positions = {(decode_kernel.arg_names.index(name),): value for name, value in constants.items()}
    return triton.compile(
        ASTSource(fn=decode_kernel, signature=signature, constexprs=positions),
        target=GPUTarget("cuda", key.arch, 32),
        options={
            "num_warps": key.tiles.num_warps,
            "num_stages": 1,
            "launch_pdl": key.overlap,
            "enable_fp_fusion": False,
        },
    )
