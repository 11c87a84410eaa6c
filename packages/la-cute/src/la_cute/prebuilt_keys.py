"""Which kernels are built ahead of time, and what they are called."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import astuple, replace

import torch

from la_core.spec.decode_problem import DecodeProblem, StateLayout
from la_cute.decode_compile_key import ARCHES, DecodeCompileKey, decode_compile_key
from la_cute.decode_tiles import DecodeTiles, choose_decode_tiles

KINDS = (
    (128, torch.bfloat16, torch.float32),
    (128, torch.bfloat16, torch.bfloat16),
    (128, torch.float16, torch.float32),
    (64, torch.bfloat16, torch.float32),
    (64, torch.bfloat16, torch.bfloat16),
)
"""K = V; the dtype of q, k, v and out; the dtype of s. The first is what engines run released models with."""

OFFSETS_DTYPES = (torch.int32, torch.int64)
LAYOUTS: tuple[StateLayout, ...] = ("vk", "kv")

HEADS = (1, 8, 16, 32, 64)
MOST_ROWS = 4096


def prebuilt_keys(arch: str) -> list[DecodeCompileKey]:
    """The keys of an architecture: for the kinds above, all that a batch of any size can need.

    Both layouts, states at multiples of 16 bytes and not, calls that overlap and calls that do not. What else the
    backend runs is left to the compiler: other sizes, K other than V, float32 q, k and v, float16 states, an out of
    another dtype.
    """
    keys: dict[DecodeCompileKey, None] = {}
    calls = itertools.product(KINDS, OFFSETS_DTYPES, LAYOUTS, (False, True))
    for (size, io_dtype, state_dtype), offsets_dtype, layout, overlap in calls:
        problem = DecodeProblem.contiguous(
            B=1,
            P=1,
            H=1,
            K=size,
            V=size,
            io_dtype=io_dtype,
            state_dtype=state_dtype,
            offsets_dtype=offsets_dtype,
            state_layout=layout,
            device="cuda",
            arch=ARCHES[arch],
        )
        problem = replace(problem, overlap=overlap)
        for tiles, aligned in itertools.product(_tiles_of_all_batches(problem), (True, False)):
            keys[decode_compile_key(problem, tiles, aligned=aligned)] = None
    return list(keys)


def function_name(key: DecodeCompileKey) -> str:
    """The name of a key's function in its library: every value of the key, in order."""
    of_key = (value for field, value in key._asdict().items() if field != "tiles")
    return "_".join(("decode", *(str(value).removeprefix("torch.") for value in (*of_key, *astuple(key.tiles)))))


def _tiles_of_all_batches(problem: DecodeProblem) -> set[DecodeTiles]:
    """What is chosen for any number of rows and heads."""
    return {choose_decode_tiles(replace(problem, B=rows, H=heads)) for heads in HEADS for rows in _batches()}


def _batches() -> Iterator[int]:
    """Every batch up to 64, then steps of a few percent: no tile is chosen for a narrower range than that."""
    rows = 1
    while rows <= MOST_ROWS:
        yield rows
        rows += max(1, rows // 64)
