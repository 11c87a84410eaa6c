"""Which kernels are built ahead of time, and what they are called."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import astuple, replace

import torch

from la_core.spec.decode_problem import DecodeProblem, StateLayout
from la_core.spec.window_problem import WindowProblem
from la_cute.decode_compile_key import ARCHES, decode_compile_key
from la_cute.decode_tiles import DecodeTiles, choose_decode_tiles
from la_cute.kernel_keys import KernelKey, keys_of_problem
from la_cute.window_problems import window_problems

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

WINDOW_KINDS = KINDS[:2]
"""Those of the window operators, with windows in the dtype of q, k and v, and offsets in int32."""

PLACES = (7, 15, 16)
"""Of windows: kernels are made for up to 7, 15 or 31 places in `decode`, and for up to 8 or 16 in `verify`."""

COUNTS_DTYPES = (None, torch.int32)
"""Of draft lengths and accepted tokens."""

HEADS = (1, 8, 16, 32, 64)
MOST_ROWS = 4096


def prebuilt_keys(arch: str) -> list[KernelKey]:
    """The keys of an architecture: for the kinds above, all that a batch of any size can need.

    Both layouts, states at multiples of 16 bytes and not, calls that overlap and calls that do not. What else the
    backend runs is left to the compiler: other sizes, K other than V, float32 q, k and v, float16 states, an out of
    another dtype, longer windows, and with windows also offsets and counts in int64.
    """
    keys: dict[KernelKey, None] = {}
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
        if (size, io_dtype, state_dtype) in WINDOW_KINDS and offsets_dtype is torch.int32:
            for places in PLACES:
                for window in window_problems(problem, places, COUNTS_DTYPES):
                    keys.update(dict.fromkeys(_keys_of_all_batches(window)))
    return list(keys)


def function_name(key: KernelKey) -> str:
    """The name of a key's function in its library: every value of the key, in order."""
    values = {"op": key.op, **key._asdict()}
    tiles = values.pop("tiles", None)
    parts = (*values.values(), *(astuple(tiles) if tiles else ()))
    return "_".join(str(value).removeprefix("torch.") for value in parts)


def _tiles_of_all_batches(problem: DecodeProblem) -> set[DecodeTiles]:
    """What is chosen for any number of rows and heads."""
    return {choose_decode_tiles(replace(problem, B=rows, H=heads)) for heads in HEADS for rows in _batches()}


def _keys_of_all_batches(window: WindowProblem) -> set[KernelKey]:
    """What is chosen for any number of rows and heads."""
    return {
        key
        for heads, rows in itertools.product(HEADS, (1 << power for power in range(13)))
        for key in keys_of_problem(replace(window, B=rows, H=heads))
    }


def _batches() -> Iterator[int]:
    """Every batch up to 64, then steps of a few percent: no tile is chosen for a narrower range than that."""
    rows = 1
    while rows <= MOST_ROWS:
        yield rows
        rows += max(1, rows // 64)
