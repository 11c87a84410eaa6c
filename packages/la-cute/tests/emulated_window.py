"""Kernels of the window operators whose PTX runs on a CPU, in place of the compiled ones, and how they are launched.

Importing this needs no compiler.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from emulated_kernel import ALLOCATIONS_AT, APART, ROWS_PER_Z, Arguments, Placed, divisor, pack, words_of
from ptx_arithmetic import Array
from ptx_emulator import GlobalMemory, parse_ptx, run_ptx

from la_cute.window_compile import staged_bytes
from la_cute.window_compile_key import CursorsCompileKey, WindowCompileKey
from la_cute.window_tiles import DRAFTS, tokens_at_once

Key = WindowCompileKey | CursorsCompileKey

POOL = ("s_offsets", "s", "decay_scales")
INPUTS = ("q", "k", "v", "out")
WINDOW = ("window_k", "window_v", "start", "length")
ARGUMENTS = {
    "decode_window": (*POOL, *INPUTS, *WINDOW),
    "verify": (*POOL, *INPUTS, *WINDOW, "counts"),
    "commit": (*POOL, *WINDOW, "counts"),
    "advance": ("s_offsets", "start", "length", "counts"),
}
"""The tensors that a kernel takes, in order; numbers come behind them."""

THREADS_OF_CURSORS = 128


def window_parameters(key: Key, arguments: Arguments, numbers: tuple[Any, ...]) -> list[Array]:
    """The parameters of a kernel, as of :func:`emulated_kernel.kernel_parameters`; without a tensor there is none."""
    tensors = [_tensor(name, placed) for name, placed in arguments.items()]
    if key.op == "advance":
        accepted, places, room, clears = numbers
        return [*tensors, pack(("i4", accepted)), *divisor(places), pack(("i4", room)), pack(("i4", clears))]
    H, G, N = arguments["window_v"].shape[2], *arguments["window_k"].shape[2:0:-1]
    slot_stride = pack(("i8", H * arguments["s"].strides[0]))
    if key.op == "commit":
        accepted, room, _, *layer_strides = numbers
        return [
            *(*tensors, pack(("i4", accepted)), pack(("i4", room)), slot_stride),
            *(pack(("i8", stride)) for stride in layer_strides),
            *(*divisor(H), *divisor(H // G), *divisor(N)),
        ]
    return [*tensors, pack(("f4", numbers[0])), slot_stride, *divisor(H // G), *divisor(N)]


def _tensor(name: str, placed: Placed) -> Array:
    """Sizes of K and V are constants, as are the strides within a head and those of a vector."""
    dynamic = 1 if name == "s" else max(1, len(placed.shape) - 1)
    strides = placed.strides[:dynamic] if len(placed.shape) > 1 else ()
    size = "i8" if name == "s" else "i4"
    return pack(
        ("u8", placed.address), *((size, n) for n in placed.shape[:dynamic]), *(("i8", stride) for stride in strides)
    )


def window_launch_shape(
    key: Key, arguments: Arguments, numbers: tuple[Any, ...]
) -> tuple[tuple[int, int, int], int, int]:
    """The grid, the threads and the bytes of shared memory of a block."""
    B = arguments["s_offsets"].shape[0]
    if isinstance(key, CursorsCompileKey):
        return (-(-B // THREADS_OF_CURSORS), 1, 1), THREADS_OF_CURSORS, 0
    layers = numbers[2] if key.op == "commit" else 1
    blocks = layers * arguments["window_v"].shape[2] * (key.V // key.tiles.block_v // key.tiles.tiles_of_block)
    sums = key.tiles.block_v * key.tiles.num_warps if key.state_layout == "kv" else 0
    rows = key.tiles.block_v * key.tiles.tiles_of_block
    of_commit = (key.K + rows) * tokens_at_once(key.K, key.window_dtype, key.tiles)
    of_verify = DRAFTS * (key.K + sums) + key.places * (key.places + 1)
    floats = {"decode_window": key.places + sums, "verify": of_verify, "commit": of_commit}[key.op]
    shared_bytes = 4 * floats + staged_bytes(key)
    return (blocks, min(B, ROWS_PER_Z), -(-B // ROWS_PER_Z)), 32 * key.tiles.num_warps, shared_bytes


def emulate_window(key: Key, ptx: str, memory: GlobalMemory, arguments: Arguments, numbers: tuple[Any, ...]) -> None:
    """Run a kernel on memory that holds its arguments."""
    kernel = parse_ptx(ptx)
    grid, threads, shared_bytes = window_launch_shape(key, arguments, numbers)
    assert kernel.threads == threads
    with np.errstate(over="ignore"):
        parameters = [part.tobytes() for part in window_parameters(key, arguments, numbers)]
    overlap = isinstance(key, WindowCompileKey) and key.overlap
    run_ptx(kernel, memory, parameters, grid, shared_bytes, overlap)


class EmulatedWindowKernel:
    """Takes the arguments of a compiled kernel, and runs its PTX on the memory of CPU tensors."""

    def __init__(self, key: Key, ptx: str) -> None:
        self.key, self.ptx = key, ptx
        self.memory: GlobalMemory
        """Of the last call, with the record of its accesses."""
        self._allocations: dict[int, int] = {}

    def record(self, tensor: torch.Tensor, of: str) -> Array | None:
        """What the last call has read or written of a tensor's storage; None if the kernel has not got it."""
        address = self._allocations.get(tensor.untyped_storage().data_ptr())
        return None if address is None else self.memory.of(address, getattr(self.memory, of))

    def __call__(self, *given: Any) -> None:
        names = ARGUMENTS[self.key.op]
        tensors = {name: one for name, one in zip(names, given, strict=False) if one is not None}
        numbers = given[len(names) :]
        storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors.values()}
        assert not any(address % 16 for address in storages), "the launch looks at real addresses"
        self._allocations = {real: ALLOCATIONS_AT + n * APART for n, real in enumerate(storages)}
        words = {self._allocations[real]: words_of(tensor) for real, tensor in storages.items()}
        arguments = {
            name: Placed(
                self._allocations[tensor.untyped_storage().data_ptr()] + int(tensor.storage_offset()) * tensor.itemsize,
                tuple(tensor.shape),
                tensor.stride(),
            )
            for name, tensor in tensors.items()
        }
        late = [self._allocations[tensors[name].untyped_storage().data_ptr()] for name in INPUTS if name in tensors]
        self.memory = GlobalMemory(words, late)
        emulate_window(self.key, self.ptx, self.memory, arguments, numbers)
        for address, content in words.items():
            content[:] = self.memory.of(address, self.memory.words)
