"""Tuning times every choice of tiles, drops what is wrong, and sets the present choice against the best."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import la_bench.grid
from la_bench.cli import main
from la_bench.environment import read_environment
from la_bench.errors import UsageError
from la_bench.tile_words import brief_tiles
from la_bench.timing import Lap, Timing
from la_bench.tune import (
    UNITS,
    Measure,
    TunedPoint,
    default_units,
    tune,
    tune_json_lines,
    tune_points,
    tune_table,
)
from la_bench.tune_backends import PackageBackend, TunableBackend, tunable_backends
from la_bench.tune_command import tune_in_turn
from la_bench.variants import backend_facts
from la_core import DecodeProblem
from la_ref.backend import RefBackend

Capture = pytest.CaptureFixture[str]

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Tiles:
    rows: int
    wrong: bool = False


class RefWithTiles:
    """la-ref, as if it had tiles."""

    def __init__(self) -> None:
        self.problems: list[DecodeProblem] = []

    def candidates(self, problem: DecodeProblem) -> Sequence[Hashable]:
        self.problems.append(problem)
        return (Tiles(1), Tiles(2), Tiles(4, wrong=True), Tiles(8))

    def chosen(self, problem: DecodeProblem) -> Hashable:
        return Tiles(2)

    def launch(self, problem: DecodeProblem, tiles: Hashable) -> Callable[..., None]:
        assert isinstance(tiles, Tiles)
        if tiles.rows == 8:
            raise ValueError("too many rows")

        def launch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: object) -> None:
            RefBackend().decode(problem, q, k, v * 2 if tiles.wrong else v, *rest)  # type: ignore[arg-type]

        return launch


def made_up_times(laps: Mapping[str, Lap]) -> Timing:
    """Two microseconds for the first choice, one more for each after it; every call is made once."""
    for lap in laps.values():
        for call in lap.calls:
            call()
    return Timing({name: [(2 + n) * 1e-6] * 3 for n, name in enumerate(laps)})


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> tuple[list[TunedPoint], RefWithTiles]:
    monkeypatch.setitem(la_bench.grid.LAP_BYTES, "cpu", 1 << 20)
    backend = RefWithTiles()
    points = tune_points((8, 16), torch.float32, "kv", "cpu")
    done, stopped = tune(points, backend, CPU, overlap=True, measure=made_up_times)
    assert stopped is None
    return done, backend


@pytest.mark.parametrize("reason", [KeyboardInterrupt(), RuntimeError("the GPU fell over")], ids=["ctrl_c", "raises"])
def test_what_ends_a_run_early_leaves_the_points_before(monkeypatch: pytest.MonkeyPatch, reason: BaseException) -> None:
    monkeypatch.setitem(la_bench.grid.LAP_BYTES, "cpu", 1 << 20)
    measured = 0

    def measure(laps: Mapping[str, Lap]) -> Timing:
        nonlocal measured
        measured += 1
        if measured == 2:
            raise reason
        return made_up_times(laps)

    points = tune_points((8, 16, 24), torch.float32, "vk", "cpu")
    done, stopped = tune(points, RefWithTiles(), CPU, overlap=False, measure=measure)
    assert [one.units for one in done] == [8]
    assert stopped is reason


def test_the_table(tuned: tuple[list[TunedPoint], RefWithTiles]) -> None:
    table = tune_table(tuned[0])
    # The present choice is always tried, here as the first.
    assert table.rows[0] == ("8", "rows=2 wrong=False", "rows=2 wrong=False", "2.00", "1.00x")
    assert {(p.overlap, p.state_layout, p.B) for p in tuned[1].problems} == {(True, "kv", 1), (True, "kv", 2)}


@dataclass(frozen=True)
class BlockTiles:
    block_v: int
    num_warps: int
    eviction: str = ""
    store_first: bool = False


@dataclass(frozen=True)
class SeveralTiles:
    block_v: int
    num_warps: int
    tiles_of_block: int
    inner_k: int = 0


@pytest.mark.parametrize(
    ("tiles", "words"),
    [
        (BlockTiles(16, 8, "evict_last"), "8 KiB, 8 warps, evict_last"),
        (BlockTiles(4, 1, store_first=True), "2 KiB, 1 warp, store_first"),
        (SeveralTiles(16, 2, 4), "32 KiB, 2 warps"),
        (SeveralTiles(16, 2, 1, inner_k=128), "8 KiB, 2 warps, inner_k 128"),
        (Tiles(2), "rows=2 wrong=False"),
    ],
)
def test_tiles_are_shown_as_a_backend_tabulates_them(tiles: Hashable, words: str) -> None:
    assert brief_tiles(tiles, row_bytes=512) == words


def test_what_is_wrong_or_raises_is_not_timed(tuned: tuple[list[TunedPoint], RefWithTiles]) -> None:
    one = tuned[0][0]
    faults = {tile.tiles: tile.fault for tile in one.times}
    assert faults[Tiles(1)] is None
    assert "state of" in str(faults[Tiles(4, wrong=True)])
    assert faults[Tiles(8)] == "ValueError: too many rows"
    assert [tile.time_us is None for tile in one.times] == [False, False, True, True]


def test_json_lines(tuned: tuple[list[TunedPoint], RefWithTiles]) -> None:
    environment = read_environment(CPU, seed=0, quick=False)
    rows = [json.loads(line) for line in tune_json_lines(tuned[0], backend_facts("ref"), environment).splitlines()]
    assert len(rows) == 8
    first = rows[0]
    assert (first["units"], first["H"], first["B"], first["layout"], first["overlap"]) == (8, 8, 1, "kv", True)
    assert first["tiles"] == {"rows": 2, "wrong": False}
    assert (first["op"], "places" in first) == ("decode", False)
    assert first["time_us"] == pytest.approx(2.0)
    assert [row["present_choice"] for row in rows[:4]] == [True, False, False, False]
    assert rows[2]["time_us"] is None
    assert first["environment"]["device"] == "cpu"
    assert first["source_hash"] == backend_facts("ref").source_hash is not None


def test_units_become_points() -> None:
    points = tune_points(UNITS, torch.float32, "vk", "cuda")
    assert [(p.H, p.B) for p in points[:2]] == [(8, 1), (8, 2)]
    assert (points[-1].H, points[-1].B) == (32, 512)
    assert all(units == p.H * p.B for p, units in zip(points, UNITS, strict=True))
    with pytest.raises(UsageError, match="multiples of 8"):
        tune_points((12,), torch.float32, "vk", "cuda")
    with pytest.raises(UsageError, match="fit into a pool"):
        tune_points((1 << 20,), torch.float32, "vk", "cuda")


def test_heads_can_be_given() -> None:
    points = tune_points((64, 16384), torch.float32, "vk", "cuda", heads=64)
    assert [(p.H, p.B) for p in points] == [(64, 1), (64, 256)]
    # No row too many is made of it: whoever gives the heads gets them.
    (point,) = tune_points((8192,), torch.float32, "vk", "cuda", heads=8)
    assert (point.H, point.B) == (8, 1024)
    with pytest.raises(UsageError, match="multiples of 64 that fit into a pool; got 32"):
        tune_points((32,), torch.float32, "vk", "cuda", heads=64)


def test_the_usual_units_suit_the_heads() -> None:
    assert default_units(None) == UNITS
    assert default_units(64) == (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
    assert default_units(8)[-1] == 8 * 512
    with pytest.raises(UsageError, match="--heads 24 divides none of the usual numbers of states"):
        default_units(24)


def in_turn(backends: Mapping[str, TunableBackend], out: Path | None, measure: Measure = made_up_times) -> int:
    points = tune_points((4, 8), torch.float32, "vk", "cpu", heads=4)
    environment = read_environment(CPU, seed=0, quick=False)
    return tune_in_turn(backends, points, CPU, environment, overlap=False, measure=measure, out=out)


class GoodTiles(RefWithTiles):
    def candidates(self, problem: DecodeProblem) -> Sequence[Hashable]:
        return (Tiles(1), Tiles(2))


@pytest.fixture
def short_laps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(la_bench.grid.LAP_BYTES, "cpu", 1 << 20)


@pytest.mark.usefixtures("short_laps")
def test_several_backends_have_a_table_each_and_one_file(tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "tiles.jsonl"
    assert in_turn({"ref": GoodTiles(), "other": GoodTiles()}, out) == 0
    printed = capsys.readouterr().out
    assert re.findall(r"tiles of (\w+), float32, vk, 4 heads", printed) == ["ref", "other"]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["backend"], row["H"], row["B"]) for row in rows] == [
        (name, 4, B) for name in ("ref", "other") for B in (1, 2) for _ in range(2)
    ]
    assert rows[0]["source_hash"] != rows[-1]["source_hash"]


@pytest.mark.usefixtures("short_laps")
def test_wrong_tiles_of_one_backend_leave_the_others(tmp_path: Path, capsys: Capture) -> None:
    assert in_turn({"ref": RefWithTiles(), "other": GoodTiles()}, tmp_path / "tiles.jsonl") == 1
    printed = capsys.readouterr().out
    assert "FAILED: ref, rows=8 wrong=False at 4 units: ValueError: too many rows" in printed
    assert "tiles of other" in printed


@pytest.mark.usefixtures("short_laps")
def test_a_backend_that_raises_leaves_the_others(tmp_path: Path, capsys: Capture) -> None:
    class Broken(GoodTiles):
        def chosen(self, problem: DecodeProblem) -> Hashable:
            raise RuntimeError("no tiles today")

    out = tmp_path / "tiles.jsonl"
    assert in_turn({"ref": Broken(), "other": GoodTiles()}, out) == 1
    assert "ref: RuntimeError: no tiles today; states in a call not finished: 4, 8" in capsys.readouterr().out
    assert {json.loads(line)["backend"] for line in out.read_text().splitlines()} == {"other"}


@pytest.mark.usefixtures("short_laps")
def test_ctrl_c_ends_all_and_keeps_what_is_done(tmp_path: Path, capsys: Capture) -> None:
    measured = 0

    def measure(laps: Mapping[str, Lap]) -> Timing:
        nonlocal measured
        measured += 1
        if measured == 4:
            raise KeyboardInterrupt
        return made_up_times(laps)

    out = tmp_path / "tiles.jsonl"
    assert in_turn({"ref": GoodTiles(), "other": GoodTiles(), "third": GoodTiles()}, out, measure) == 130
    printed = capsys.readouterr().out
    assert "other: stopped by Ctrl-C; states in a call not finished: 8" in printed
    assert "third: not begun" in printed
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["backend"], row["units"]) for row in rows] == [
        *[("ref", 4)] * 2,
        *[("ref", 8)] * 2,
        *[("other", 4)] * 2,
    ]


def test_all_means_every_backend_that_has_tiles() -> None:
    pytest.importorskip("triton")
    pytest.importorskip("la_cute")
    assert list(tunable_backends(("all",), ("cute", "never-heard-of", "ref", "triton"))) == ["cute", "triton"]
    assert list(tunable_backends(("triton", "cute"), ())) == ["triton", "cute"]
    with pytest.raises(UsageError, match="--backend ref cannot be tuned"):
        tunable_backends(("triton", "ref"), ())
    with pytest.raises(UsageError, match="no installed backend has tiles"):
        tunable_backends(("all",), ("ref",))


def test_backends_that_cannot_be_tuned() -> None:
    with pytest.raises(UsageError, match="--backend nonsense cannot be tuned"):
        PackageBackend("nonsense")
    with pytest.raises(UsageError, match="--backend ref cannot be tuned"):
        PackageBackend("ref")


def test_the_tiles_of_triton() -> None:
    pytest.importorskip("la_triton")
    backend = PackageBackend("triton")
    problem = DecodeProblem.contiguous(B=2, P=4, H=8, K=128, V=128, device="cuda", arch=(9, 0))
    assert backend.chosen(problem) in backend.candidates(problem)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_tune_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune"]) == 2
    message = capsys.readouterr().err
    assert "tune needs a CUDA device" in message
    assert "--device" not in message
