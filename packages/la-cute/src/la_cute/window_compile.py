"""Compiling the kernels of the window operators: a function of a small key, without tensors, launch or GPU."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import cutlass.cute as cute
import torch

from la_core.spec.decode_problem import StateLayout
from la_cute.decode_tiles import ACCESS_BYTES, IO_PIECE, ThreadLayout
from la_cute.kernel_parts import EVICT_FIRST, EVICT_LAST
from la_cute.symbolic_tensors import window_arguments
from la_cute.window_compile_key import WindowCompileKey
from la_cute.window_tiles import DRAFTS, TEAM, TEAMS_OF_WARP, WindowTiles, tokens_at_once, window_threads

MOST_STAGED = 24 * 1024
"""Bytes of shared memory that a block takes for a window; a larger one is read from global memory instead."""

KEY_REGISTERS = 32
"""Most registers of a thread for keys that it loads early."""

WIDENED = 64
"""Values of a state that a thread widens to float32 at a time: all of most tiles, since each time costs a way through
the tokens."""

KERNELS = {"decode_window": "window_decode_kernel", "verify": "verify_kernel", "commit": "commit_kernel"}
"""The module of each operator's kernel."""


@dataclass(frozen=True)
class WindowSpec:
    """Compile-time arguments of the kernels; as :class:`la_cute.decode_compile.KernelSpec`, and what a window adds."""

    K: int
    V: int
    state_layout: StateLayout
    aligned: bool
    overlap: bool
    tiles: WindowTiles
    threads: ThreadLayout
    blocks: int
    repeat_step: int
    line_step: int
    steps: int
    state_bits: int
    io_piece: int
    load_policy: int | None
    places: int
    """The most places of a window."""
    along_k: tuple[int, int]
    """What a thread needs of a vector along K, [run, repeats]."""
    along_v: tuple[int, int]
    """What a thread needs of a vector along V."""
    teams: int
    """Teams of a block, each of which multiplies one key with a query at a time."""
    team_vector: int
    """Elements side by side of a key in one thread of a team."""
    team_repeats: int
    team_step: int
    """Elements of a key between the runs of a thread."""
    key_rounds: int
    """Places of a team."""
    early_keys: bool
    """Whether a thread holds the keys of all its places before it needs the first."""
    keys_at_once: int
    """Places whose keys verify has on the way at a time."""
    query_rounds: int
    """Runs of 4 elements of a few drafts' queries in one thread."""
    sharers: int
    """Threads that share the sum of one output."""
    value_rounds: int
    """Places of a sharer."""
    staged: bool
    """Whether a full window comes into the state from shared memory."""
    fold_lines: int
    """Lines of a state that one thread brings it into at a time."""
    rows_of_block: int
    """Rows of V of a block, in all of its tiles."""
    tokens_at_once: int
    """Tokens that a block of commit has in shared memory at a time."""
    token_rounds: tuple[int, int]
    """Runs of 4 elements of their keys and of their values in one thread."""
    least_blocks: int
    """Blocks that a multiprocessor must have room for: what keeps the compiler to a budget of registers."""


def key_rounds(key: WindowCompileKey) -> int:
    """Places of a team of 8 threads."""
    return -(-key.places // (32 // TEAM * key.tiles.num_warps))


def early_keys(key: WindowCompileKey) -> bool:
    """Whether a thread of `decode_window` holds the keys of all its places before it needs the first."""
    return key_rounds(key) * key.K // TEAM * key.window_dtype.itemsize // 4 <= KEY_REGISTERS


def staged_bytes(key: WindowCompileKey) -> int:
    """Shared memory of a block for the tokens of a full window; 0 if they are read from global memory."""
    size = key.places * (key.K + key.tiles.block_v) * torch.float32.itemsize
    return size if key.op == "decode_window" and early_keys(key) and size <= MOST_STAGED else 0


def fold_lines(key: WindowCompileKey, threads: ThreadLayout) -> int:
    """Lines of a thread's part of a state that `decode_window` holds in float32 at a time.

    All of them if that is their dtype; else as many as take the registers that the rest of the kernel takes as well.
    """
    if key.state_dtype.itemsize == 4:
        return threads.passes
    return min(threads.passes, max(1, WIDENED // (threads.vector * threads.repeats)))


def window_spec(key: WindowCompileKey) -> WindowSpec:
    """What a key means for the kernels."""
    threads = window_threads(key.K, key.state_dtype, key.state_layout, key.tiles)
    side, lines = (threads.vector, threads.repeats), (threads.passes, 1)
    vk = key.state_layout == "vk"
    teams = 32 // TEAM * key.tiles.num_warps
    sharers = threads.lanes if vk else threads.lines * key.tiles.num_warps
    rows_of_block = key.tiles.block_v * key.tiles.tiles_of_block
    tokens = tokens_at_once(key.K, key.window_dtype, key.tiles)
    pieces = IO_PIECE * 32 * key.tiles.num_warps
    rounds = key_rounds(key)
    return WindowSpec(
        K=key.K,
        V=key.V,
        state_layout=key.state_layout,
        aligned=key.aligned,
        overlap=key.overlap,
        tiles=key.tiles,
        threads=threads,
        blocks=key.V // rows_of_block,
        repeat_step=threads.lanes * threads.vector,
        line_step=key.K if vk else key.V,
        steps=(threads.lanes if vk else threads.lines).bit_length() - 1,
        state_bits=8 * ACCESS_BYTES if key.aligned else 0,
        io_piece=IO_PIECE,
        load_policy={"": None, "evict_first": EVICT_FIRST, "evict_last": EVICT_LAST}[key.tiles.eviction],
        places=key.places,
        along_k=side if vk else lines,
        along_v=lines if vk else side,
        teams=teams,
        team_vector=threads.vector,
        team_repeats=key.K // (TEAM * threads.vector),
        team_step=TEAM * threads.vector,
        key_rounds=rounds,
        early_keys=early_keys(key),
        keys_at_once=min(rounds, max(1, 4 * KEY_REGISTERS // (key.K // TEAM * key.window_dtype.itemsize))),
        query_rounds=-(-key.K * DRAFTS // (IO_PIECE * 32 * key.tiles.num_warps)),
        sharers=sharers,
        value_rounds=-(-key.places // sharers),
        staged=staged_bytes(key) > 0,
        fold_lines=fold_lines(key, threads),
        rows_of_block=rows_of_block,
        tokens_at_once=tokens,
        token_rounds=(-(-tokens * key.K // pieces), -(-tokens * rows_of_block // pieces)),
        least_blocks=least_blocks(key),
    )


def least_blocks(key: WindowCompileKey) -> int:
    """Blocks that fit a multiprocessor with as many registers as a kernel needs to spill none.

    The more blocks, the more of the states are on their way at a time. 24 warps leave 80 registers to a thread, 20
    leave 96, 16 leave 128, and 12 leave 168.
    """
    values = key.tiles.block_v * key.K // (32 * key.tiles.num_warps)
    teams = TEAMS_OF_WARP * key.tiles.num_warps
    # Keys of few threads take registers, as do states that are widened before a loop, and V contiguous.
    wide = key.K * key.window_dtype.itemsize > 256 or key.state_layout == "kv"
    many = wide or key.state_dtype.itemsize < 4
    if key.op == "commit":
        warps = 16
    elif key.op == "decode_window":
        few = 24 if key.tiles.num_warps >= 4 else 16 if teams < key.places else 20
        warps = 0 if wide or key.K < 128 or key.places > 16 else 12 if values > 64 else 16 if values > 32 else few
    elif key.places > 32 or (key.places > 16 and many):
        warps = 0
    elif values > 32:
        # On other architectures than the one that this was measured on, 128 registers are just too few.
        warps = 12 if many or key.K < 128 or teams < key.places or key.arch != "sm_90a" else 16
    else:
        warps = 16 if many or key.places > 16 else 20
    return max(1, warps // key.tiles.num_warps)


def compile_window(key: WindowCompileKey, options: str = "") -> Any:
    """Compile for the key's architecture; `options` are further ones of the compiler.

    The result takes torch tensors and numbers, those of the kernel's `launch` up to the stream, and launches on the
    current stream of their device.
    """
    options = f"--enable-tvm-ffi --gpu-arch={key.arch} {options}"
    launch = import_module(f"la_cute.{KERNELS[key.op]}").launch
    return cute.compile(launch, *window_arguments(key), window_spec(key), options=options)
