"""Kernels are counted for the backend and subject that they were made for, with the time of making them."""

from __future__ import annotations

import sys
import types
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

import la_bench.grid
import la_bench.kernel_watch
import la_bench.timing
from la_bench.environment import read_environment
from la_bench.grid import GridPoint
from la_bench.kernel_watch import KernelCounter, KernelWatch, kernel_counter
from la_bench.report_content import kernel_table
from la_bench.rows import KernelsMade, Row, from_json_lines, to_json_lines
from la_bench.run_grid import run_grid
from la_bench.timing import Effort, Lap
from la_bench.variants import BackendVariant, backend_variants
from la_bench.write_report import render_report
from la_core import DecodeProblem
from la_ref.backend import RefBackend

MakeRow = Callable[..., Row]

CPU = torch.device("cpu")
TINY = Effort(seconds=0.05, min_rounds=3, max_rounds=3)
MAKING_S, CALL_S = 2.0, 0.25


class Clock:
    """Stands still unless it is told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(la_bench.kernel_watch, "perf_counter", clock)
    return clock


class Compiling(RefBackend):
    """la-ref, which takes its time before the first call with a number of heads, and with overlap again."""

    name = "compiling"

    def __init__(self, clock: Clock) -> None:
        self.kernels: dict[tuple[int, bool], str] = {}
        self.clock = clock

    def decode(self, problem: DecodeProblem, *arguments: object) -> None:  # type: ignore[override]
        self.clock.now += CALL_S
        key = problem.H, problem.overlap
        if key not in self.kernels:
            self.clock.now += MAKING_S
            self.kernels[key] = "disk" if problem.H == 4 else "compiled"
        super().decode(problem, *arguments)  # type: ignore[arg-type]


@pytest.fixture
def compiling(clock: Clock, install: Callable[[object], None], monkeypatch: pytest.MonkeyPatch) -> Compiling:
    """Installed as if from a package of its own, `la_compiling`, that counts its kernels."""
    monkeypatch.setitem(la_bench.grid.LAP_BYTES, "cpu", 1 << 20)
    monkeypatch.setitem(la_bench.timing.COPY_BYTES, "cpu", 8 << 20)
    monkeypatch.setattr(Compiling, "__module__", "la_compiling.backend")
    backend = Compiling(clock)
    package, cache = types.ModuleType("la_compiling"), types.ModuleType("la_compiling.compiled_kernel_cache")
    package.__path__ = []
    cache.kernels_made = lambda: len(backend.kernels)  # type: ignore[attr-defined]
    cache.kernel_origins = lambda: Counter(backend.kernels.values())  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, cache.__name__, cache)
    install(backend)
    return backend


def run(*points: tuple[int, int], overlap: bool = False) -> list[Row]:
    variants = backend_variants(("compiling", "ref"), None)
    variants += [BackendVariant("compiling", overlap=True)] if overlap else []
    environment = read_environment(CPU, seed=0, quick=True)
    return run_grid([GridPoint(H, B, device_type="cpu") for H, B in points], variants, CPU, environment, TINY)


@pytest.mark.usefixtures("compiling")
def test_each_row_has_the_kernels_that_were_made_for_it() -> None:
    rows = run((2, 1), (2, 2), (4, 1))
    assert [row.status for row in rows] == ["ok"] * 6
    made = [row.kernels for row in rows if row.backend.name == "compiling"]
    assert [one and (one.count, one.origins) for one in made] == [(1, {"compiled": 1}), (0, {}), (1, {"disk": 1})]
    # What making took is in it, what the call itself took is not.
    assert [one.seconds for one in made if one is not None] == [MAKING_S, 0, MAKING_S]
    assert all(row.kernels is None for row in rows if row.backend.name == "ref")
    assert from_json_lines(to_json_lines(rows)) == rows


@pytest.mark.usefixtures("compiling")
def test_variants_of_one_backend_count_their_own_kernels() -> None:
    made = {row.backend.name: row.kernels for row in run((2, 1), overlap=True)}
    one = KernelsMade(1, MAKING_S, {"compiled": 1})
    assert made == {"compiling": one, "compiling+overlap": one, "ref": None}


def test_what_a_run_made_before_belongs_to_no_row(compiling: Compiling) -> None:
    compiling.kernels[2, False] = "compiled"
    made = run((2, 1))[0].kernels
    assert made == KernelsMade(0, 0.0, {})


def test_every_distinct_call_of_a_lap_may_make_kernels(clock: Clock) -> None:
    kernels: set[str] = set()

    def call(name: str) -> None:
        clock.now += CALL_S + (0 if name in kernels else MAKING_S)
        kernels.add(name)

    watch = KernelWatch(KernelCounter(lambda: len(kernels), None))
    assert watch.kernels() is None
    watch.make_all(Lap([partial(call, name) for name in "abac"], 2))
    assert watch.kernels() == KernelsMade(2, 2 * MAKING_S, None)


def test_a_call_that_raises_does_not_count() -> None:
    watch = KernelWatch(KernelCounter(lambda: 0, None))
    with pytest.raises(RuntimeError, match="on purpose"), watch.call():
        raise RuntimeError("on purpose")
    assert watch.kernels() is None


def test_backends_of_this_project_count_their_kernels() -> None:
    assert kernel_counter("la_ref") is None
    pytest.importorskip("la_cute")
    cute = kernel_counter("la_cute")
    assert cute is not None
    assert cute.origins is not None
    assert cute.made() == sum(cute.origins().values())
    pytest.importorskip("triton")
    triton = kernel_counter("la_triton")
    assert triton is not None
    assert triton.made() >= 0


@pytest.mark.parametrize("grid", [None, (8, 1)], ids=["workloads", "grid"])
def test_the_report_adds_them_up(grid: tuple[int, int] | None, make_row: MakeRow) -> None:
    rows = [
        replace(make_row(backend="cute", grid=grid), kernels=KernelsMade(2, 0.75, {"compiled": 1, "prebuilt": 1})),
        replace(make_row("minicpm-sala/heavy", "cute"), kernels=KernelsMade(1, 0.5, {"prebuilt": 1})),
        replace(make_row(backend="triton", grid=grid), kernels=KernelsMade(4, 2.0, None)),
        make_row(backend="ref", grid=grid),
    ]
    table = kernel_table(rows)
    assert table is not None
    assert table.rows == (("cute", "1 compiled, 2 prebuilt", "3", "1.250"), ("triton", "not told", "4", "2.000"))
    markdown = render_report(rows)["report.md"]
    assert "## Kernels made" in markdown
    assert "| cute | 1 compiled, 2 prebuilt | 3 | 1.250 |" in markdown


def test_rows_from_before_kernels_were_counted_can_be_read(make_row: MakeRow) -> None:
    old = to_json_lines([make_row()])
    assert "kernels" not in old
    assert from_json_lines(old) == [make_row()]
    assert kernel_table([make_row()]) is None
    assert "Kernels made" not in render_report([make_row()])["report.md"]
