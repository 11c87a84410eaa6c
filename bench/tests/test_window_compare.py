"""Comparing operators with a window: the gate, rows, reports, two runs, and the program."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import la_bench.grid
import la_bench.timing
from la_bench.accuracy import floor_faults
from la_bench.cli import _parser, main
from la_bench.compare_command import _grid_points, options_in_words
from la_bench.compare_runs import compare_runs
from la_bench.environment import read_environment
from la_bench.grid import GRID_FULL, GridPoint
from la_bench.grid_spec import parse_grid
from la_bench.interpreter import READ, _receive, _send, serve
from la_bench.roofline import FLOOR_FACTOR
from la_bench.rows import BackendFacts, Row, from_json_lines, to_json_lines
from la_bench.run_window import estimate_window_seconds, run_window
from la_bench.tensors import DecodeCall
from la_bench.timing import Bound, Effort
from la_bench.variants import FLOOR, PeerVariant, Variant
from la_bench.window_calls import WindowCall, WindowTensors
from la_bench.window_spec import GRIDS, WINDOW_OPS, WindowSpec, window_spec
from la_bench.window_variants import bind_action, rivals_of, ways_of, window_variants
from la_bench.write_report import render_report
from la_core import WindowProblem
from la_ref.backend import RefBackend

CPU = torch.device("cpu")
TINY = Effort(seconds=0.05, min_rounds=2, max_rounds=2)
POINTS = [GridPoint(2, 1, device_type="cpu"), GridPoint(2, 9, device_type="cpu")]
SPECS = {op: window_spec(op, (7,) if op == "deferred" else (), None, None) for op in WINDOW_OPS}

Install = Callable[[object], None]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(la_bench.grid.LAP_BYTES, "cpu", 4 << 20)
    monkeypatch.setitem(la_bench.timing.COPY_BYTES, "cpu", 8 << 20)


def spec_of(op: str) -> WindowSpec:
    spec = SPECS[op]
    assert spec is not None
    return spec


def run(
    spec: WindowSpec, *backends: str, points: list[GridPoint] = POINTS, more: tuple[Variant, ...] = ()
) -> list[Row]:
    variants = [*window_variants(backends, spec, None), *more]
    return run_window(points, spec, variants, CPU, read_environment(CPU, seed=0, quick=True), TINY)


class TorchFloor(Variant):
    """The in-place floor in plain torch."""

    def __init__(self) -> None:
        self.facts = BackendFacts(FLOOR, "torch", None, "floor")

    def bind(self, call: DecodeCall) -> Bound:
        call = call.for_floor()
        rows = (
            call.s_offsets.long()[:, None] * len(call.decay_scales) + torch.arange(len(call.decay_scales))
        ).flatten()

        def multiply() -> None:
            call.s[rows] *= FLOOR_FACTOR

        return multiply

    def run(self, call: DecodeCall) -> torch.Tensor:
        self.bind(call)()
        return call.out


@pytest.mark.parametrize("op", WINDOW_OPS)
def test_rows_say_everything(op: str) -> None:
    spec = spec_of(op)
    rows = run(spec, "ref", "never-heard-of")
    names = {
        "deferred": ["ref+window7", "ref"],
        "verify": ["ref+window16", "ref+commit", "ref"],
        "commit": ["ref+layers", "ref+commit", "ref+fold"],
    }[op]
    mine = [row for row in rows if row.status == "ok"]
    assert [row.backend.name for row in mine] == names * 2
    assert {row.status for row in rows} == {"ok", "unavailable"}
    assert from_json_lines(to_json_lines(rows)) == rows
    suffix = "" if op == "deferred" else f"/T4/L{spec.layers}"
    assert [row.workload.name for row in mine[:: len(names)]] == [f"{op}/H2/B1{suffix}", f"{op}/H2/B9{suffix}"]
    for row in mine:
        assert row.result is not None
        assert (row.workload.op, row.workload.grid) == (op, True)
        assert row.backend.source_hash is not None
        assert row.result.gb_per_s > 0
        assert 0 < row.result.state_error < 1e-6
    first = mine[0]
    assert first.result is not None
    assert first.result.time_over is not None
    roles = {"deferred": {"recurrent"}, "verify": {"decodes", "commit"}, "commit": {"commit", "fold"}}[op]
    assert set(first.result.time_over) == roles
    by_name = {row.backend.name: row.result.time_us for row in mine[: len(names)] if row.result}
    rival = {"deferred": "ref", "verify": "ref+commit", "commit": "ref+commit"}[op]
    role = "recurrent" if op == "deferred" else "commit"
    assert first.result.time_over[role] == pytest.approx(by_name[names[0]] / by_name[rival])
    assert first.window == spec.places[0]
    assert "does not" not in first.auto_choice.split("ref: ")[1].split(";")[0]
    assert (first.workload.accepted, first.workload.drafts) == (
        (None, None) if op == "deferred" else ("uniform over 1 to 4", 4)
    )


def test_only_deferred_runs_with_overlap_and_floors(install: Install) -> None:
    other = RefBackend()
    other.name = "other"
    install(other)
    pytest.importorskip("triton")
    names = {op: [v.name for v in window_variants(("ref", "other"), spec_of(op), (9, 0))] for op in WINDOW_OPS}
    assert names["deferred"] == [
        *("ref+window7", "ref"),
        *("other+window7", "other+window7+overlap", "other", "other+overlap"),
        *(FLOOR, f"{FLOOR}+overlap"),
    ]
    assert names["verify"] == [f"{name}{way}" for name in ("ref", "other") for way in ("+window16", "+commit", "")]
    assert names["commit"] == [f"{n}+{way}" for n in ("ref", "other") for way in ("layers", "commit", "fold")]
    by_name = {v.name: v for v in window_variants(("other",), spec_of("deferred"), (9, 0))}
    assert rivals_of(by_name["other+window7+overlap"], spec_of("deferred")) == {"recurrent": "other+overlap"}
    assert rivals_of(by_name["other"], spec_of("deferred")) == {}


def test_several_windows_stand_side_by_side() -> None:
    rows = run(WindowSpec("deferred", (3, 7)), "ref", points=POINTS[:1])
    assert [(row.backend.name, row.window, row.status) for row in rows] == [
        ("ref+window3", 3, "ok"),
        ("ref+window7", 7, "ok"),
        ("ref", None, "ok"),
    ]


@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("op", WINDOW_OPS)
def test_16_bit_states_in_both_layouts_pass_the_gate(op: str, layout: Any) -> None:
    point = GridPoint(2, 3, torch.bfloat16, layout, "cpu")
    peers = (PeerVariant("torch-naive", None),) if op == "deferred" else ()
    rows = run(spec_of(op), "ref", points=[point], more=(*peers, TorchFloor()) if op == "deferred" else ())
    assert {row.status for row in rows} == {"ok"}, [row.reason for row in rows]
    if op == "deferred":
        results = {row.backend.name: row.result for row in rows}
        mine, floor = results["ref+window7"], results[FLOOR]
        assert mine is not None
        assert floor is not None
        assert mine.share_of_floor == pytest.approx(floor.time_us / mine.time_us)
        assert mine.speedup_vs_peer is not None
        # The floor moves float32 states.
        assert floor.gb_per_s * floor.time_us * 1e3 > 2 * 2 * point.state_bytes
        assert rows[0].workload.floor_dtype == "float32"
        assert "The in-place floor is that of recurrent decode with float32 states." in render_report(rows)["report.md"]


class NeverFolds(RefBackend):
    """Decode with a full window drops the token; folds bring in nothing."""

    name = "never_folds"

    def decode_window(self, problem: WindowProblem, *arguments: Any) -> None:
        s = arguments[3].clone()
        super().decode_window(problem, *arguments)
        arguments[3].copy_(s)

    def commit(self, problem: WindowProblem, *arguments: Any) -> None:
        return


class KeepsRejected(RefBackend):
    """advance accepts all drafts."""

    name = "keeps_rejected"

    def advance(self, problem: WindowProblem, window: Any, s_offsets: Any, accepted: Any, *rest: Any) -> None:
        most = problem.N if isinstance(accepted, torch.Tensor) else accepted
        super().advance(problem, window, s_offsets, most, *rest)


class OtherSlot(RefBackend):
    """Writes to a slot that no row names."""

    name = "other_slot"

    def decode_window(self, problem: WindowProblem, *arguments: Any) -> None:
        super().decode_window(problem, *arguments)
        free = next(slot for slot in range(problem.P) if slot not in arguments[4].tolist())
        arguments[6].k[free, 0, 0, 0] += 1


class OldBackend(RefBackend):
    """Knows decode only."""

    name = "old"
    capabilities = replace(RefBackend.capabilities, ops=("decode",))


@pytest.mark.parametrize(
    ("backend", "op", "variant", "sentence"),
    [
        (NeverFolds, "deferred", "window7", "state of"),
        (NeverFolds, "verify", "window16", "commit: state of"),
        (NeverFolds, "verify", "commit", "commit: state of"),
        (NeverFolds, "commit", "layers", "state of"),
        (KeepsRejected, "verify", "window16", "advance: window.length must be"),
        (OtherSlot, "deferred", "window7", "the window's k outside of the new tokens' places must not change"),
    ],
)
@pytest.mark.parametrize("B", [1, 9])
def test_a_wrong_backend_shows_what_is_wrong(
    backend: type[RefBackend], op: str, variant: str, sentence: str, B: int, install: Install
) -> None:
    install(backend())
    rows = run(spec_of(op), "ref", backend.name, points=[GridPoint(2, B, device_type="cpu")])
    by_name = {row.backend.name: row for row in rows}
    wrong = by_name[f"{backend.name}+{variant}"]
    assert (wrong.status, wrong.result) == ("failed", None)
    assert sentence in str(wrong.reason)
    assert {row.status for row in rows if row.backend.name.startswith("ref")} == {"ok"}


def test_the_gate_leaves_everything_as_it_was(install: Install) -> None:
    spec = spec_of("verify")
    tensors = WindowTensors(POINTS, spec, CPU, 0)
    subject = la_bench.run_window.WindowSubject(POINTS[1], tensors, spec)
    subject.start_judging()
    call = subject._judged()
    kept = [call.pools, *(t for window in call.windows.values() for t in window.tensors())]
    before = [t.clone() for t in kept]
    install(KeepsRejected())
    for variant in window_variants(("ref", "keeps_rejected"), spec, None):
        subject.judge(variant)
    assert all(torch.equal(one, other) for one, other in zip(kept, before, strict=True))


def test_a_backend_without_the_operator_is_refused_with_its_sentence(install: Install) -> None:
    install(OldBackend())
    rows = run(spec_of("deferred"), "old", points=POINTS[:1])
    assert [(row.backend.name, row.status) for row in rows] == [("old+window7", "refused"), ("old", "ok")]
    assert "backend 'old' does not implement decode_window" in str(rows[0].reason)


def test_ctrl_c_keeps_the_points_that_are_done(install: Install, made_up: SimpleNamespace) -> None:
    interrupting = made_up.Interrupting()
    # Recurrent decode: the gate, two calls for memory, and four calls in a warm-up and in each of two rounds.
    interrupting.good_calls = 3 + 4 * 3
    install(interrupting)
    points = [GridPoint(2, 2, device_type="cpu"), GridPoint(2, 4, device_type="cpu")]
    rows = run(spec_of("deferred"), "interrupting", points=points)
    assert [(row.workload.name, row.status) for row in rows] == [
        *[("deferred/H2/B2", "ok")] * 2,
        *[("deferred/H2/B4", "interrupted")] * 2,
    ]
    assert render_report(rows)["report.md"].count("stopped by Ctrl-C") >= 1


@pytest.mark.parametrize("op", WINDOW_OPS)
def test_the_other_process_makes_the_same_calls(op: str) -> None:
    spec = spec_of(op)
    point = [GridPoint(2, 3, device_type="cpu")]
    here, there = (WindowTensors(point, spec, CPU, 0).lap(point[0])[0] for _ in range(2))
    assert isinstance(here, WindowCall)
    assert isinstance(there, WindowCall)
    for way in ways_of(spec):
        for mine, theirs in zip(way.actions(here), way.actions(there), strict=True):
            bind_action(mine, "ref")()
            window = theirs.window
            message = {name: getattr(theirs, name) for name in READ}
            message |= {"window_k": window.k, "window_v": window.v, "start": window.start, "length": window.length}
            message |= {} if theirs.out is None else {"out": theirs.out}
            source, target = io.BytesIO(), io.BytesIO()
            _send(source, {**message, "op": theirs.case.op, "L": theirs.case.L, "room": theirs.case.room})
            source.seek(0)
            serve("ref", source, target)
            target.seek(0)
            reply = _receive(target)
            assert torch.equal(reply["s"], mine.s)
            assert torch.equal(reply["length"], mine.window.length)
            assert torch.equal(reply["window_k"], mine.window.k)
            bind_action(theirs, "ref")()


def test_the_default_run_takes_less_than_90_seconds() -> None:
    peers = ("cula", "sglang", "vllm", "fla", "torch-naive")
    for op in WINDOW_OPS:
        spec = window_spec(op, (), None, None)
        assert spec is not None
        names = [variant.name for variant in window_variants(("triton", "cute"), spec, None)]
        if op == "deferred":
            names = [*names, *(f"{name}+overlap" for name in names), FLOOR, f"{FLOOR}+overlap", *peers]
        points = [GridPoint(H, B) for H, B in parse_grid(GRIDS[op])]
        assert sum(estimate_window_seconds(point, names, GRID_FULL, spec) for point in points) < 90


@pytest.mark.parametrize("op", WINDOW_OPS)
def test_a_run_from_end_to_end(op: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--op", op, "--device", "cpu", "--quick", "--backends", "ref", "--grid", "2x1,4"]
    assert main(["compare", *arguments, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "2 points x " in printed
    assert "H = 2: ratios" in printed
    plot = {"deferred": "time_over_recurrent", "verify": "time_over_commit", "commit": "time_over_folds"}[op]
    assert (tmp_path / f"{plot}.svg").exists()
    rows = from_json_lines((tmp_path / "rows.jsonl").read_text())
    assert {row.environment.options for row in rows} == {f"--quick --op {op} --grid 2x1,4 --backends ref --device cpu"}
    assert render_report(rows)["report.html"] == (tmp_path / "report.html").read_text()
    assert main(["report", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "again")]) == 0
    assert (tmp_path / "again" / "report.md").read_text() == (tmp_path / "report.md").read_text()
    difference = compare_runs(rows, rows)
    assert {change.verdict for change in difference.changes} == {"SAME"}
    assert len(difference.changes) == len(rows)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--grid"], "--grid 8,16,32,64x1,2,4,8,16,32,64,128,256,512"),
        (["--grid", "--quick"], "--quick --grid 8,64x1,8,64,256"),
        (["--op", "deferred", "--grid", "--window", "3,7"], "--op deferred --window 3,7 --grid 8,32,64x1,64,128,512"),
        (["--op", "verify", "--drafts", "2", "--layers", "9"], "--op verify --drafts 2 --layers 9"),
    ],
)
def test_rows_name_the_options(arguments: list[str], words: str) -> None:
    options = _parser().parse_args(["compare", *arguments])
    assert options_in_words(options, _grid_points(options, torch.device("cuda"))) == words


@pytest.mark.parametrize(
    ("arguments", "device", "points"),
    [
        (["--op", "deferred"], "cuda", 12),
        (["--op", "deferred", "--quick"], "cuda", 6),
        (["--op", "verify", "--grid"], "cuda", 4),
        (["--op", "commit", "--quick"], "cuda", 2),
        (["--op", "commit"], "cpu", 2),
        (["--op", "verify", "--grid", "8x1,2,3"], "cuda", 3),
    ],
)
def test_the_grid_of_each_operator(arguments: list[str], device: str, points: int) -> None:
    assert len(_grid_points(_parser().parse_args(["compare", *arguments]), torch.device(device))) == points


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--window", "7"], "belong to --op deferred, verify or commit"),
        (["--op", "deferred", "--workloads", "all"], "--workloads belong to --op decode"),
        (["--op", "verify", "--peers", "cula"], "--peers and --peer belong to --op decode and deferred"),
        (["--op", "verify", "--window", "3"], "must hold the 4 drafts"),
        (["--op", "commit", "--layers", "10000"], "the pool holds the states of"),
    ],
)
def test_wrong_options(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--device", "cpu", *arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_the_floor_of_these_tests_is_one() -> None:
    before = torch.randn(4, 3, 5)
    assert floor_faults(before, before * FLOOR_FACTOR)[0] == ()
