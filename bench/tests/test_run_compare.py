"""The gate comes before the clock, and one backend's trouble leaves the rows of the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import la_bench.tensors
import la_bench.timing
from la_bench.accuracy import Gate, gate_case
from la_bench.environment import read_environment
from la_bench.errors import UsageError
from la_bench.extra_memory import peak_extra_bytes
from la_bench.roofline import roofline
from la_bench.rows import Row, from_json_lines, to_json_lines
from la_bench.run_compare import estimate_workload_seconds, run_compare
from la_bench.timing import FULL, Effort, spread
from la_bench.variants import BackendVariant, backend_variants, select_backends
from la_bench.workloads import Workload, make_workload, select_workloads
from la_core.conformance.tolerances import UNIT_ROUNDOFF

Install = Callable[[object], None]

TINY = Effort(seconds=0.05, min_rounds=3, max_rounds=3)
CPU = torch.device("cpu")


@pytest.fixture
def workload(monkeypatch: pytest.MonkeyPatch) -> Workload:
    """Two batches of a light workload, over a small arena and beside a small copy."""
    monkeypatch.setitem(la_bench.tensors.ARENA_BYTES, "cpu", 48 << 20)
    monkeypatch.setitem(la_bench.timing.COPY_BYTES, "cpu", 8 << 20)
    whole = make_workload("ling-2.6-flash-tp4/light", "cpu", seed=0)
    return replace(whole, batches=whole.batches[:2])


def run(*backends: str, on: tuple[Workload, ...]) -> list[Row]:
    return run_compare(on, backend_variants(backends, None), CPU, read_environment(CPU, seed=0, quick=True), TINY)


def test_ref_is_right_and_timed(workload: Workload) -> None:
    (row,) = run("ref", on=(workload,))
    assert row.status == "ok"
    assert row.reason is None
    result = row.result
    assert result is not None
    assert 0 < result.time_us_p20 <= result.time_us <= result.time_us_p80
    assert (result.samples, result.calls_per_sample, result.speedup_vs_ref) == (3, 2, 1.0)
    assert result.gb_per_s == pytest.approx(row.workload.bytes_per_call / result.time_us / 1e3)
    assert result.share_of_copy == pytest.approx(result.copy_floor_us / result.time_us)
    # An error of exactly zero would mean that nothing was compared.
    assert 0 < result.out_error < UNIT_ROUNDOFF[torch.bfloat16]
    assert 0 < result.state_error < UNIT_ROUNDOFF[torch.bfloat16] ** 2
    assert 1 << 20 < result.extra_bytes < 64 << 20
    assert "chosen: ref" in row.auto_choice
    assert row.backend.distribution is not None
    assert row.backend.distribution.startswith("la-ref ")
    assert row.backend.source_hash is not None
    assert row.environment.triton is None or row.environment.triton[0].isdigit()


def test_rows_from_before_compilers_were_named_can_be_read(make_row: Callable[..., Row]) -> None:
    old = to_json_lines([make_row()])
    assert "cutlass_dsl" not in old
    assert from_json_lines(old) == [make_row()]
    row = make_row()
    new = to_json_lines([replace(row, environment=replace(row.environment, cutlass_dsl="4.8.1"))])
    assert from_json_lines(new)[0].environment.cutlass_dsl == "4.8.1"
    assert to_json_lines(from_json_lines(new)) == new


def test_a_wrong_backend_gets_a_sentence_instead_of_a_time(
    workload: Workload, install: Install, made_up: SimpleNamespace
) -> None:
    install(made_up.Wrong())
    wrong, ref = run("wrong", "ref", on=(workload,))
    assert (wrong.status, wrong.result) == ("failed", None)
    assert wrong.reason is not None
    assert "state of" in wrong.reason
    assert "relative L2 error" in wrong.reason
    assert ref.status == "ok"


def test_refused_and_unavailable_rows_carry_their_reasons(
    workload: Workload, install: Install, made_up: SimpleNamespace
) -> None:
    install(made_up.Unwilling())
    ref, unwilling, cute = run("ref", "unwilling", "never-heard-of", on=(workload,))
    assert ref.status == "ok"
    assert (unwilling.status, unwilling.result) == ("refused", None)
    assert "runs nothing on Fridays" in str(unwilling.reason)
    assert (cute.status, cute.result, cute.backend.source_hash) == ("unavailable", None, None)
    assert "'never-heard-of' is not installed" in str(cute.reason)


@pytest.mark.parametrize("good_calls", [0, 1, 3, 6], ids=lambda n: f"after_{n}_calls")
def test_a_backend_that_raises_leaves_the_other_rows(
    workload: Workload, install: Install, made_up: SimpleNamespace, good_calls: int
) -> None:
    # Call 0 is the gate, 1 and 2 measure memory, the others are timed.
    raising = made_up.Raising()
    raising.good_calls = good_calls
    install(raising)
    broken, ref = run("raising", "ref", on=(workload,))
    assert (broken.status, broken.result) == ("error", None)
    assert broken.reason == "RuntimeError: the kernel fell over"
    assert ref.status == "ok"
    assert ref.result is not None
    assert ref.result.samples == 3


def test_ctrl_c_keeps_finished_workloads_and_names_the_others(
    workload: Workload, install: Install, made_up: SimpleNamespace
) -> None:
    # One gate, two calls for memory, then two calls a walk: a warm-up and three rounds.
    interrupting = made_up.Interrupting()
    interrupting.good_calls = 3 + 2 * 4 + 1
    install(interrupting)
    second = replace(workload, name="ling-2.6-flash-tp4/second")
    rows = run("ref", "interrupting", on=(workload, second))
    assert [(row.workload.name, row.status) for row in rows] == [
        (workload.name, "ok"),
        (workload.name, "ok"),
        (second.name, "interrupted"),
        (second.name, "interrupted"),
    ]
    assert all(row.reason == "stopped by Ctrl-C before it was finished" for row in rows[2:])


def test_rows_survive_json_and_are_self_contained(workload: Workload) -> None:
    rows = run("ref", "never-heard-of", on=(workload,))
    text = to_json_lines(rows)
    assert from_json_lines(text) == rows
    assert to_json_lines(from_json_lines(text)) == text
    assert len(text.splitlines()) == 2


def test_rows_of_another_schema_are_refused(make_row: Callable[..., Row]) -> None:
    text = to_json_lines([make_row()]).replace('"schema": 2', '"schema": 99')
    with pytest.raises(ValueError, match="row schema must be 2, got 99"):
        from_json_lines(text)


def test_the_gate_judges_the_batch_that_is_timed(workload: Workload) -> None:
    case = gate_case(workload, seed=0)
    batch = workload.batches[0]
    assert case.offsets is not None
    assert [slot < 0 for slot in case.offsets] == [slot < 0 for slot in batch]
    live = [slot for slot in batch if slot >= 0]
    placed = [slot for slot in case.offsets if slot >= 0]
    ranks = [sorted(live).index(slot) for slot in live]
    assert [sorted(placed).index(slot) for slot in placed] == ranks
    assert {0, case.P - 1}.isdisjoint(placed)
    assert len(placed) + 3 == case.P
    assert case.decays == tuple(workload.model.slopes(0).tolist())


def test_every_wrong_backend_is_judged_by_the_same_truth(
    workload: Workload, install: Install, made_up: SimpleNamespace
) -> None:
    install(made_up.Wrong())
    gate = Gate(workload, CPU, seed=0)
    assert gate.judge(BackendVariant("ref")).faults == ()
    assert gate.judge(BackendVariant("wrong")).faults
    assert gate.judge(BackendVariant("ref")).faults == ()


def test_the_estimate_of_a_full_run_on_a_cpu_is_less_than_two_minutes() -> None:
    workloads = len(select_workloads("cpu", (), quick=False))
    one = estimate_workload_seconds(3, FULL["cpu"], "cpu")
    assert FULL["cpu"].seconds < one < estimate_workload_seconds(12, FULL["cpu"], "cpu")
    assert 30 < workloads * one < 120


def test_backend_selection() -> None:
    assert select_backends(()) == ("ref", "cute", "triton")
    assert select_backends(("ref",)) == ("ref",)
    with pytest.raises(UsageError, match=r"no backend is called 'fer'\. Installed: .*ref"):
        select_backends(("ref", "fer"))


def test_peak_extra_memory_counts_what_is_alive_at_once() -> None:
    def call() -> None:
        first = torch.empty(1 << 20, dtype=torch.uint8)
        second = torch.empty(2 << 20, dtype=torch.uint8)
        del first, second
        torch.empty(1 << 20, dtype=torch.uint8)

    assert 3 << 20 <= peak_extra_bytes(call, CPU) < (3 << 20) + 4096
    assert peak_extra_bytes(lambda: None, CPU) == 0


def test_roofline_of_a_case_worked_by_hand() -> None:
    line = roofline(bytes_per_call=4e6, seconds_per_call=1e-3, copy_bytes=10**9, copy_seconds=[0.1, 0.125, 0.5])
    assert (line.gb_per_s, line.copy_gb_per_s) == (4.0, 8.0)
    assert (line.share_of_copy, line.copy_floor_us) == (0.5, 500.0)


def test_spread_of_cases_worked_by_hand() -> None:
    one = spread([3.0])
    assert (one.median, one.p20, one.p80) == (3.0, 3.0, 3.0)
    many = spread([5.0, 1.0, 4.0, 2.0, 3.0, 6.0])
    assert (many.p20, many.median, many.p80) == (2.0, 3.5, 5.0)
