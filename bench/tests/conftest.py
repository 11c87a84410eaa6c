"""Rows made up without measuring, and backends that are wrong, refuse or raise, installed for one test."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch

from la_bench.do_nothing_backend import DoNothingBackend
from la_bench.environment import Environment
from la_bench.host_overhead import installed_backend
from la_bench.rows import SCHEMA, BackendFacts, Kind, Result, Row, Status, WorkloadFacts
from la_core import DecodeProblem
from la_ref.backend import RefBackend

ENVIRONMENT = Environment(
    utc="2026-01-02T03:04:05Z",
    device="cpu",
    machine="A <made-up> CPU, 2 cores",
    cache_bytes=1 << 25,
    system="Linux x86_64",
    threads=2,
    python="3.11.0",
    torch="2.13.0",
    cuda=None,
    la_core="0.1.0",
    la_bench="0.1.0",
    spec_revision=1,
    commit="0123456789abcdef",
    dirty=False,
    seed=0,
    quick=False,
)


def _make_row(
    workload: str = "ring-mini-linear-2.0/medium",
    backend: str = "ref",
    status: Status = "ok",
    reason: str | None = None,
    time_us: float = 1500.0,
    copy_gb_per_s: float = 20.0,
    kind: Kind = "backend",
    against: tuple[float, float] | None = None,
    host_us: float | None = None,
    grid: tuple[int, int] | None = None,
) -> Row:
    facts = WorkloadFacts(
        name=workload,
        description="A made-up workload",
        model="Ring-mini-linear-2.0" if workload.startswith("ring") else "MiniCPM-SALA",
        load=workload.split("/")[1],
        H=16,
        G=16,
        K=128,
        V=128,
        io_dtype="bfloat16",
        state_dtype="float32",
        out_dtype="bfloat16",
        offsets_dtype="int32",
        state_layout="vk",
        pool_slots=40,
        live_rows=[20, 24],
        padded_rows=[24, 24],
        slopes="minimax",
        linear_layers=16,
        layers_timed=[0, 8, 18],
        bytes_per_call=6e7,
        reuse_bytes=1 << 28,
    )
    if grid is not None:
        H, B = grid
        facts = replace(facts, name=f"H{H}/B{B}", H=H, live_rows=[B], padded_rows=[B], grid=True)
    speedup, share = against or (None, None)
    result = None
    if status == "ok":
        result = Result(
            time_us=time_us,
            time_us_p20=time_us * 0.9,
            time_us_p80=time_us * 1.2,
            samples=30,
            calls_per_sample=6,
            gb_per_s=6e4 / time_us,
            copy_gb_per_s=copy_gb_per_s,
            share_of_copy=6e4 / time_us / copy_gb_per_s,
            copy_floor_us=6e4 / copy_gb_per_s,
            speedup_vs_ref=1500.0 / time_us,
            speedup_vs_peer=speedup,
            share_of_floor=share,
            out_error=None if kind == "floor" else 2e-3,
            state_error=4e-8,
            state_layout="vk",
            extra_bytes=8 << 20,
            host_us=host_us,
            host_us_p20=host_us,
            host_us_p80=host_us,
            tiles=None,
        )
    return Row(
        SCHEMA,
        facts,
        BackendFacts(
            backend, f"la-{backend} 0.1.0", "ab" * 32, kind, "+" in backend, None if kind == "backend" else "Differs."
        ),
        status,
        reason,
        result,
        "ref: ok; chosen: ref (asked for 'auto')",
        ENVIRONMENT,
    )


@pytest.fixture
def make_row() -> Callable[..., Row]:
    """Makes a row without measuring anything."""
    return _make_row


class Wrong(RefBackend):
    """Leaves the states undecayed."""

    name = "wrong"

    def decode(
        self,
        problem: DecodeProblem,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        s: torch.Tensor,
        s_offsets: torch.Tensor,
        decay_scales: torch.Tensor,
        softmax_scale: float,
        out: torch.Tensor,
    ) -> None:
        super().decode(problem, q, k, v, s, s_offsets, torch.zeros_like(decay_scales), softmax_scale, out)


class Unwilling(DoNothingBackend):
    name = "unwilling"

    def refusal(self, problem: DecodeProblem) -> str | None:
        return "runs nothing on Fridays"


class Raising(RefBackend):
    """Raises in the call after `good_calls` others."""

    name = "raising"
    good_calls = 0

    def decode(self, *arguments: object) -> None:  # type: ignore[override]
        if self.good_calls == 0:
            raise RuntimeError("the kernel fell over")
        self.good_calls -= 1
        super().decode(*arguments)  # type: ignore[arg-type]


class Interrupting(RefBackend):
    """As if Ctrl-C were pressed in the call after `good_calls` others."""

    name = "interrupting"
    good_calls = 0

    def decode(self, *arguments: object) -> None:  # type: ignore[override]
        if self.good_calls == 0:
            raise KeyboardInterrupt
        self.good_calls -= 1
        super().decode(*arguments)  # type: ignore[arg-type]


@pytest.fixture
def made_up() -> types.SimpleNamespace:
    """The classes of made-up backends."""
    return types.SimpleNamespace(Wrong=Wrong, Unwilling=Unwilling, Raising=Raising, Interrupting=Interrupting)


@pytest.fixture
def install() -> Iterator[Callable[[object], None]]:
    """Installs backend objects under their own names until the test ends."""
    module = types.ModuleType("la_bench_backends_of_a_test")
    sys.modules[module.__name__] = module
    with ExitStack() as stack:

        def put(backend: object) -> None:
            name = str(backend.name)  # type: ignore[attr-defined]
            setattr(module, name, backend)
            stack.enter_context(installed_backend(name, f"{module.__name__}:{name}"))

        yield put
    del sys.modules[module.__name__]
