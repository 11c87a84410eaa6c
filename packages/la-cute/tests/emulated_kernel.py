"""A decode kernel whose PTX runs on a CPU, in place of the compiled one, and how its launch is made.

Importing this needs no compiler.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from ptx_arithmetic import Array
from ptx_emulator import GlobalMemory, parse_ptx, run_ptx

from la_cute.decode_compile_key import DecodeCompileKey

ROWS_PER_Z = 32768
"""Blocks along y; the rows beyond go along z."""

ALLOCATIONS_AT = 0x7F00_0000_0000
APART = 1 << 34
"""Between allocations, so that an address of 32 bits is in none."""


class Placed(NamedTuple):
    """A tensor as a kernel sees it."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


Arguments = dict[str, Placed]
"""By the names of the operator's arguments."""


def pack(*numbers: tuple[str, float]) -> Array:
    """Numbers of the kinds that numpy names, each at a multiple of its own size."""
    fields = [(f"field{n}", kind) for n, (kind, _) in enumerate(numbers)]
    return np.array([tuple(number for _, number in numbers)], np.dtype(fields, align=True))


def divisor(number: int) -> list[Array]:
    """A divisor with its multiplier and its two shifts, and once more by itself."""
    bits = (number - 1).bit_length()
    multiplier = (1 << 32) * ((1 << bits) - number) // number + 1
    return [
        pack(("i4", number), ("u4", multiplier), ("u1", min(bits, 1)), ("u1", max(bits - 1, 0))),
        pack(("i4", number)),
    ]


def kernel_parameters(arguments: Arguments, softmax_scale: float, P: int) -> list[Array]:
    """The parameters of a kernel: numbers, and where each lies.

    A tensor is its address, then the sizes and then the strides that are no constants.
    """

    def tensor(name: str, sizes: str, strides: int) -> Array:
        placed = arguments[name]
        return pack(
            ("u8", placed.address),
            *((kind, size) for kind, size in zip(sizes.split(), placed.shape, strict=False)),
            *(("i8", stride) for stride in placed.strides[:strides]),
        )

    H, G = arguments["v"].shape[1], arguments["q"].shape[1]
    return [
        tensor("s_offsets", "i4", 0),
        tensor("s", "i8", 1),
        tensor("decay_scales", "i4", 0),
        *(tensor(name, "i4 i4", 2) for name in ("q", "k", "v", "out")),
        pack(("f4", softmax_scale)),
        pack(("i8", P)),
        pack(("i8", H * arguments["s"].strides[0])),
        *divisor(H // G),
    ]


def launch_shape(key: DecodeCompileKey, B: int, H: int) -> tuple[tuple[int, int, int], int]:
    """The grid, and the bytes of shared memory of a block."""
    grid = (H * (key.V // key.tiles.block_v), min(B, ROWS_PER_Z), -(-B // ROWS_PER_Z))
    sums = key.tiles.num_warps if key.state_layout == "kv" else int(key.tiles.crowded)
    return grid, 4 * key.tiles.block_v * sums


def emulate(
    key: DecodeCompileKey,
    ptx: str,
    memory: GlobalMemory,
    arguments: Arguments,
    softmax_scale: float,
    P: int,
    first_row: int = 0,
) -> None:
    """Run a kernel on memory that holds its arguments, from a row on that is a multiple of ROWS_PER_Z."""
    B, H, _ = arguments["v"].shape
    grid, shared_bytes = launch_shape(key, B, H)
    if first_row:
        grid = (grid[0], B - first_row, 1)
    kernel = parse_ptx(ptx)
    assert kernel.threads == 32 * key.tiles.num_warps
    with np.errstate(over="ignore"):
        parameters = [numbers.tobytes() for numbers in kernel_parameters(arguments, softmax_scale, P)]
    run_ptx(kernel, memory, parameters, grid, shared_bytes, key.overlap, first=(0, 0, first_row // ROWS_PER_Z))


def words_of(tensor: torch.Tensor) -> Array:
    """The storage of a tensor on the CPU, in words."""
    content: Array = torch.tensor([], dtype=torch.uint8).set_(tensor.untyped_storage()).numpy().view(np.uint16)
    return content


class EmulatedKernel:
    """Takes the arguments of a compiled kernel, and runs its PTX on the memory of CPU tensors."""

    def __init__(self, key: DecodeCompileKey, ptx: str, first_row: int = 0) -> None:
        self.key, self.ptx, self.first_row = key, ptx, first_row
        self.memory: GlobalMemory
        """Of the last call, with the record of its accesses."""
        self.arguments: Arguments = {}
        self._allocations: dict[int, int] = {}

    def allocation(self, tensor: torch.Tensor) -> int:
        """The address that stands for the beginning of a tensor's storage."""
        return self._allocations[tensor.untyped_storage().data_ptr()]

    def __call__(
        self,
        s_offsets: torch.Tensor,
        s: torch.Tensor,
        decay_scales: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        softmax_scale: float,
        P: int,
    ) -> None:
        tensors = {"s_offsets": s_offsets, "s": s, "decay_scales": decay_scales, "q": q, "k": k, "v": v, "out": out}
        storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors.values()}
        assert not any(address % 16 for address in storages), "the launch looks at real addresses"
        self._allocations = {real: ALLOCATIONS_AT + n * APART for n, real in enumerate(storages)}
        words = {self._allocations[real]: words_of(tensor) for real, tensor in storages.items()}
        self.arguments = {
            name: Placed(
                address=self.allocation(tensor) + int(tensor.storage_offset()) * tensor.itemsize,
                shape=tuple(tensor.shape),
                strides=tensor.stride(),
            )
            for name, tensor in tensors.items()
        }
        late = [self.allocation(tensor) for tensor in (q, k, v, out)]
        self.memory = GlobalMemory(words, late)
        emulate(self.key, self.ptx, self.memory, self.arguments, softmax_scale, P, self.first_row)
        for address, content in words.items():
            content[:] = self.memory.of(address, self.memory.words)
