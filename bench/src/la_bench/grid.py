"""A grid of sizes: heads x rows, each a call of its own, with how many calls and slots one measurement takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from la_bench.grid_spec import DTYPE_NAMES
from la_bench.timing import Effort
from la_core import DecodeProblem
from la_core.spec.decode_problem import StateLayout

SIZE = 128
"""K = V."""

MIN_CALLS, MAX_CALLS = 4, 300
"""Calls in one lap."""

LAP_BYTES = {"cpu": 64 << 20, "cuda": 2 << 30}
"""States that a lap visits if `MAX_CALLS` allow: on a GPU 30 times an L2 of 60 MB, and about 1 ms at 4 TB/s, beside
which the start of a graph does not count."""

POOL_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 30}
"""Most values in a pool: addresses of kernels that count them in 32 bits must not overflow."""

HOST_BYTES = 32 << 20
"""Calls with more states than this are so long that their host time is not of interest."""

GRID_FULL = Effort(seconds=0.8, min_rounds=9, max_rounds=15)
GRID_QUICK = Effort(seconds=0.2, min_rounds=5, max_rounds=7)

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_NAMES}


@dataclass(frozen=True)
class GridPoint:
    """Calls of one size on one type of device."""

    H: int
    B: int
    state_dtype: torch.dtype = torch.float32
    layout: StateLayout = "vk"
    device_type: str = "cuda"
    io_dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        """As in rows."""
        return f"H{self.H}/B{self.B}"

    @property
    def elements(self) -> int:
        """Values in the states of one call."""
        return self.H * self.B * SIZE * SIZE

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of one call."""
        return self.elements * self.state_dtype.itemsize

    @property
    def calls(self) -> int:
        """Calls in a lap."""
        wanted = -(-LAP_BYTES[self.device_type] // self.state_bytes)
        return max(MIN_CALLS, min(MAX_CALLS, wanted))

    @property
    def chunks(self) -> int:
        """Calls of a lap that share no slot."""
        return min(self.calls, POOL_ELEMENTS[self.device_type] // self.elements)

    @property
    def slots(self) -> int:
        """Slots of the pool."""
        return self.B * self.chunks

    @property
    def fits(self) -> bool:
        """Whether the states of a call fit into a pool."""
        return self.chunks > 0

    def problem(self) -> DecodeProblem:
        """The facts of a call, for questions asked without tensors."""
        return DecodeProblem.contiguous(
            B=self.B,
            P=self.slots,
            H=self.H,
            K=SIZE,
            V=SIZE,
            io_dtype=self.io_dtype,
            state_dtype=self.state_dtype,
            state_layout=self.layout,
            device=self.device_type,
        )


BYTES_PER_S = {"cpu": 1e10, "cuda": 4e12}
LEAST_CALL_S = {"cpu": 1e-4, "cuda": 3e-6}
FIXED_S = 0.12
"""Of each variant at each point: judging, choosing tiles, building a graph."""

CAPTURE_S = 6e-5
"""Of each call that is captured."""

COPY_S = 2.5e-3
COMPILE_S = {"cula": 3.0}
"""Of each point, for variants that compile anew for each batch size."""

RUN_S = {"cpu": 2.0, "cuda": 0.0}
"""Of each run on a CPU: the pool, what the first calls import, and the report."""

INTERPRETER_S, INTERPRETED_S = 3.0, 1.0
"""Of a backend that is judged under its interpreter: its process, and each point or workload."""

HEAVY = {"torch-naive": 6.0, "ref": 8.0}
"""Times the bytes that others move."""


def estimate_seconds(point: GridPoint, variants: Sequence[str], effort: Effort, *, launches: float = 1.0) -> float:
    """About how long all variants take at a point; `launches` are those of a call, each about as long as a decode."""
    lap = point.calls * max(LEAST_CALL_S[point.device_type], 2 * point.state_bytes / BYTES_PER_S[point.device_type])
    per_round = launches * sum(lap * HEAVY.get(name, 1.0) for name in variants) + COPY_S
    fixed = sum(FIXED_S + launches * point.calls * CAPTURE_S + COMPILE_S.get(name, 0.0) for name in variants)
    return fixed + effort.rounds(per_round) * per_round


def estimate_setup_seconds(device_type: str, subjects: int, interpreted: int) -> float:
    """About how long a run takes beside its timed variants, of which some are judged under an interpreter instead."""
    return RUN_S[device_type] + interpreted * (INTERPRETER_S + subjects * INTERPRETED_S)


def in_words(seconds: float) -> str:
    """A duration, roughly."""
    return f"{max(1, round(seconds))} s" if seconds < 90 else f"{seconds / 60:.0f} min"
