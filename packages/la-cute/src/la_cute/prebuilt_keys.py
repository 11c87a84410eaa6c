"""Which kernels are built ahead of time, and what they are called."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import astuple, replace
from typing import Literal

import torch

from la_core.spec.decode_problem import DecodeProblem, StateLayout
from la_core.spec.window_problem import WindowProblem
from la_cute.decode_compile_key import ARCHES
from la_cute.kernel_keys import KernelKey, keys_of_problem
from la_cute.window_problems import window_problems

Family = Literal["decode", "window"]
"""Kernels that one library holds: a process opens those of decode alone until it calls an operator of the KV window."""

FAMILIES: tuple[Family, ...] = ("decode", "window")

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

WINDOW_ARCHES = ("sm_80", "sm_90a", "sm_100a")
"""Those of the servers that run the large models which window operators are for."""

WINDOW_KINDS = KINDS[:2]
"""Those of the window operators, with windows in the dtype of q, k and v, and offsets in int32."""

PLACES = (7, 15)
"""Of windows: kernels are made for up to 7 or 15 places in `decode`, and for up to 8 or 16 in `verify`."""

COUNTS_DTYPES = (None, torch.int32)
"""Of draft lengths and accepted tokens."""

MOST_STATES = 4096 * 64
"""Rows times heads of the largest batch."""


def prebuilt_keys(arch: str, family: Family) -> list[KernelKey]:
    """The keys of an architecture's library: for the kinds above, all that a batch of any size can need.

    Both layouts, calls that overlap and calls that do not, and any addresses: so that no call is refused for those,
    which are not known before it.

    What else the backend runs is left to the compiler: other sizes, K other than V, float32 q, k and v, float16 states,
    an out of another dtype. A kernel of a window operator takes more than twice as long to compile as one of decode, so
    of these it is also K = V = 64, float16, offsets and counts in int64, sm_120a, and longer windows than
    :data:`PLACES` says; `commit` takes any window.
    """
    problems = itertools.product(KINDS, OFFSETS_DTYPES, LAYOUTS, (False, True))
    keys: dict[KernelKey, None] = {}
    for (size, io_dtype, state_dtype), offsets_dtype, layout, overlap in problems:
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
        if family == "decode":
            keys.update(dict.fromkeys(_keys_of_all_batches(problem)))
        elif arch in WINDOW_ARCHES and (size, io_dtype, state_dtype) in WINDOW_KINDS and offsets_dtype is torch.int32:
            for places in PLACES:
                for window in window_problems(problem, places, COUNTS_DTYPES):
                    keys.update(dict.fromkeys(_keys_of_all_batches(window)))
    return list(keys)


def family_of(key: KernelKey) -> Family:
    """The family of a key."""
    return "decode" if key.op == "decode" else "window"


def function_name(key: KernelKey) -> str:
    """The name of a key's function in its library: every value of the key, in order."""
    values = {"op": key.op, **key._asdict()}
    tiles = values.pop("tiles", None)
    parts = (*values.values(), *(astuple(tiles) if tiles else ()))
    return "_".join(str(value).removeprefix("torch.") for value in parts)


def _keys_of_all_batches(problem: DecodeProblem | WindowProblem) -> Iterator[KernelKey]:
    """What is chosen for any number of rows and heads, of which their product counts, and the bytes of a slot.

    Every product up to 32, then steps of at most 1/16: no tile is chosen for a narrower range than that.
    """
    states = 1
    while states <= MOST_STATES:
        for rows, heads in ((states, 1), (1, states)):
            yield from keys_of_problem(replace(problem, B=rows, H=heads, G=heads))
        states += max(1, states // 16)
