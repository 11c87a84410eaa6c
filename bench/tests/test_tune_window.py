"""Tiles of the operators with a window: each candidate judged and timed on calls at random phases of the windows."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import la_bench.grid
from la_bench.environment import read_environment
from la_bench.grid import GridPoint
from la_bench.timing import Lap, Timing
from la_bench.tune import tune, tune_points
from la_bench.tune_backends import AnyProblem, PackageBackend, tunable_backends
from la_bench.tune_command import tune_in_turn
from la_bench.tune_subjects import WindowPoint
from la_bench.window_calls import WindowTensors
from la_bench.window_spec import WindowSpec
from la_core import WindowProblem
from la_core.spec.window_problem import WindowOp
from la_ref.backend import RefBackend

CPU = torch.device("cpu")
SPECS = {
    "deferred": WindowSpec("deferred", (3,)),
    "verify": WindowSpec("verify", (8,), 2, 1),
    "commit": WindowSpec("commit", (8,), 2, 1),
}
OPS: dict[str, WindowOp] = {"deferred": "decode_window", "verify": "verify", "commit": "commit"}


@pytest.fixture(autouse=True)
def short_laps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(la_bench.grid.LAP_BYTES, "cpu", 1 << 20)


@dataclass(frozen=True)
class Tiles:
    block_v: int
    num_warps: int = 4
    wrong: bool = False


class RefWithTiles:
    """la-ref, as if it had tiles; the wrong ones take the values of the window or of the call twice."""

    def __init__(self) -> None:
        self.problems: list[AnyProblem] = []
        self.lengths: set[int] = set()

    def candidates(self, problem: AnyProblem) -> Sequence[Hashable]:
        self.problems.append(problem)
        return (Tiles(16), Tiles(32), Tiles(64, wrong=True))

    def chosen(self, problem: AnyProblem) -> Hashable:
        return Tiles(32)

    def launch(self, problem: AnyProblem, tiles: Hashable) -> Callable[..., None]:
        assert isinstance(problem, WindowProblem)
        assert isinstance(tiles, Tiles)
        wrong, backend = tiles.wrong, RefBackend()

        def launch(*arguments: Any) -> None:
            window = arguments[0] if problem.op == "commit" else arguments[6]
            slots = arguments[2] if problem.op == "commit" else arguments[4]
            self.lengths |= set(window.length[slots.long()].tolist())
            if problem.op == "commit":
                slopes = arguments[3] * 2 if wrong else arguments[3]
                backend.commit(problem, *arguments[:3], slopes, *arguments[4:])
            elif problem.op == "verify":
                v = arguments[2] * 2 if wrong else arguments[2]
                backend.verify(problem, *arguments[:2], v, *arguments[3:])
            else:
                v = arguments[2] * 2 if wrong else arguments[2]
                backend.decode_window(problem, *arguments[:2], v, *arguments[3:])

        return launch


def made_up_times(laps: Mapping[str, Lap]) -> Timing:
    """Two microseconds for the first choice, one more for each after it; every call is made once."""
    for lap in laps.values():
        for call in lap.calls:
            call()
    return Timing({name: [(2 + n) * 1e-6] * 3 for n, name in enumerate(laps)})


@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("op", SPECS)
def test_right_tiles_are_timed_and_wrong_ones_named(op: str, layout: Any) -> None:
    backend = RefWithTiles()
    points = tune_points((2, 6), torch.float32, layout, "cpu", heads=2)
    tuned, stopped = tune(points, backend, CPU, overlap=op != "commit", measure=made_up_times, spec=SPECS[op])
    assert stopped is None
    for one in tuned:
        faults = {tile.tiles: tile.fault for tile in one.times}
        assert faults[Tiles(16)] is faults[Tiles(32)] is None
        assert "of" in str(faults[Tiles(64, wrong=True)])
        assert [tile.time_us is None for tile in one.times] == [False, False, True]
    problems = [problem for problem in backend.problems if isinstance(problem, WindowProblem)]
    assert {problem.op for problem in problems} == {OPS[op]}
    assert [problem.B for problem in problems] == [1, 3]
    assert {(problem.overlap, problem.N, problem.T) for problem in problems} == {
        (op != "commit", SPECS[op].places[0], 2 if op == "verify" else 1)
    }
    assert {problem.counts_dtype for problem in problems} == {torch.int32 if op == "commit" else None}


def test_windows_are_judged_full_and_timed_with_room_for_the_drafts() -> None:
    lengths = {}
    for op, spec in SPECS.items():
        backend = RefWithTiles()
        points = tune_points((8,), torch.float32, "vk", "cpu", heads=2)
        tune(points, backend, CPU, overlap=False, measure=made_up_times, spec=spec)
        lengths[op] = backend.lengths
    assert lengths["deferred"] == {0, 1, 2, 3}
    assert max(lengths["verify"]) == 8 - 2
    assert lengths["commit"] == {0}


def test_what_is_timed_is_the_operator_alone() -> None:
    point = GridPoint(2, 3, device_type="cpu")
    for op, spec in SPECS.items():
        subject = WindowPoint(point, WindowTensors([point], spec, CPU, 0), spec)
        subject.start_judging()
        problem = subject.facts_of_calls()
        assert isinstance(problem, WindowProblem)
        assert (problem.op, problem.L) == (OPS[op], 1)
        lap = subject.variant(RefWithTiles(), problem, Tiles(16)).lap(subject.calls().lap, 1)
        assert (lap.per_call, lap.renew) == (1.0, None)
        assert subject.way.bytes_at(point) > point.state_bytes


def test_a_table_for_each_window_and_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "tiles.jsonl"
    points = tune_points((4,), torch.float32, "vk", "cpu", heads=4)
    specs = [WindowSpec("verify", (places,), 2, 1) for places in (4, 8)]

    class Good(RefWithTiles):
        def candidates(self, problem: AnyProblem) -> Sequence[Hashable]:
            return super().candidates(problem)[:2]

    environment = read_environment(CPU, seed=0, quick=False, options="--op verify --window 4,8")
    options: dict[str, Any] = {"overlap": False, "specs": specs, "wanted": ((8, 4),)}
    status = tune_in_turn({"ref": Good()}, points, CPU, environment, measure=made_up_times, out=out, **options)
    assert status == 0
    printed = re.sub(r"\s+", " ", capsys.readouterr().out)
    for places in (4, 8):
        assert f"tiles of ref, verify of 2 drafts with {places} places, float32, vk, 4 heads" in printed
        assert f"the shortest choice for ref, verify of 2 drafts with {places} places within 2% of the best" in printed
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {row["environment"]["options"] for row in rows} == {"--op verify --window 4,8"}
    # 8 KiB in 4 warps, and the present choice.
    assert [(row["op"], row["places"], row["drafts"], row["tiles"]["block_v"]) for row in rows] == [
        ("verify", places, 2, rows_of_v) for places in (4, 8) for rows_of_v in (32, 16)
    ]


@pytest.mark.parametrize("op", ["decode_window", "verify", "commit"])
@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("name", ["triton", "cute"])
def test_the_tiles_of_the_packages(name: str, layout: Any, op: WindowOp) -> None:
    pytest.importorskip(f"la_{name}")
    pytest.importorskip("triton")
    backend = PackageBackend(name, windows=True)
    problem = WindowProblem.contiguous(
        op, B=2, P=4, N=16, H=8, K=128, V=128, T=4, state_layout=layout, device="cuda", arch=(9, 0)
    )
    candidates = backend.candidates(problem)
    assert backend.chosen(problem) in candidates
    assert len(candidates) == len(set(candidates))
    most = 128 * 4 // problem.state_dtype.itemsize if problem.state_dtype else 0
    for tiles in candidates:
        assert 0 < problem.K * tiles.block_v <= most * 32 * tiles.num_warps, "what the registers of its warps hold"


def test_a_launch_of_cute_takes_the_arguments_of_its_backend() -> None:
    pytest.importorskip("la_cute")
    backend = PackageBackend("cute", windows=True)
    problem = WindowProblem.contiguous("decode_window", B=2, P=4, N=7, H=8, K=128, V=128, device="cuda", arch=(9, 0))
    tiles = backend.candidates(problem)[0]
    launch: Any = backend.launch(problem, tiles)
    assert (launch.__name__, launch.__self__.tiles) == ("decode", tiles)


def test_all_means_every_backend_that_has_tiles_of_windows() -> None:
    pytest.importorskip("triton")
    pytest.importorskip("la_cute")
    assert list(tunable_backends(("all",), ("cute", "ref", "triton"), windows=True)) == ["cute", "triton"]
