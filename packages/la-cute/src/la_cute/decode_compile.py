"""Compiling the decode kernels: a function of a small key, without tensors, without a launch, without a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute

from la_core.spec.decode_problem import StateLayout
from la_cute.decode_compile_key import DecodeCompileKey
from la_cute.decode_kernel import launch
from la_cute.decode_tiles import ACCESS_BYTES, IO_PIECE, DecodeTiles, ThreadLayout, thread_layout
from la_cute.kernel_parts import EVICT_LAST
from la_cute.symbolic_tensors import decode_arguments


@dataclass(frozen=True)
class KernelSpec:
    """Compile-time arguments of the kernels."""

    K: int
    V: int
    state_layout: StateLayout
    aligned: bool
    overlap: bool
    tiles: DecodeTiles
    threads: ThreadLayout
    blocks: int
    """Thread blocks of one state."""
    repeat_step: int
    """Elements of a state between a thread's accesses on a line."""
    line_step: int
    """Elements of a state between lines."""
    steps: int
    """Shuffles that sum over the lanes which share a sum."""
    state_bits: int
    """Of one access to a state; 0 for one value at a time."""
    io_piece: int
    """Most elements of q, k or v in one access."""
    load_policy: int | None


def kernel_spec(key: DecodeCompileKey) -> KernelSpec:
    """What a key means for the kernels."""
    assert not key.tiles.crowded or (key.state_layout == "vk" and key.tiles.num_warps > 1)
    threads = thread_layout(key.K, key.state_dtype, key.state_layout, key.tiles)
    sharing = threads.lanes if key.state_layout == "vk" else threads.lines
    return KernelSpec(
        K=key.K,
        V=key.V,
        state_layout=key.state_layout,
        aligned=key.aligned,
        overlap=key.overlap,
        tiles=key.tiles,
        threads=threads,
        blocks=key.V // key.tiles.block_v,
        repeat_step=threads.lanes * threads.vector,
        line_step=key.K if key.state_layout == "vk" else key.V,
        steps=sharing.bit_length() - 1,
        state_bits=8 * ACCESS_BYTES if key.aligned else 0,
        io_piece=IO_PIECE,
        load_policy=EVICT_LAST if key.tiles.eviction == "evict_last" else None,
    )


def compile_decode(key: DecodeCompileKey, options: str = "") -> Any:
    """Compile for the key's architecture; `options` are further ones of the compiler.

    The result takes torch tensors: (s_offsets, s, decay_scales, q, k, v, out, softmax_scale, P), and launches on the
    current stream of their device.
    """
    options = f"--enable-tvm-ffi --gpu-arch={key.arch} {options}"
    return cute.compile(launch, *decode_arguments(key), kernel_spec(key), options=options)
