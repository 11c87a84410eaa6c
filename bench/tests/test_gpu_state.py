"""Driver, clocks, options, variables, sources and tiles get into rows and reports. No GPU is needed: both ways to one
are stood in for.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import la_bench.comparison
import la_bench.timing
from la_bench import gpu_state
from la_bench.cli import _parser
from la_bench.compare_command import _grid_points, options_in_words
from la_bench.environment import git_state, read_environment
from la_bench.gpu_state import UNKNOWN, GpuState, read_gpu
from la_bench.grid import GRID_QUICK, GridPoint
from la_bench.rows import Row, from_json_lines, to_json_lines
from la_bench.run_grid import run_grid
from la_bench.tile_words import chosen_tiles, show_tiles
from la_bench.tune_command import tune_words
from la_bench.variants import BackendVariant
from la_bench.write_report import render_report
from la_core import DecodeProblem
from la_core.conformance.source_hash import source_hash

UUID = "01234567-89ab"
GPU, CPU = torch.device("cuda"), torch.device("cpu")
PROBLEM = DecodeProblem.contiguous(B=1, P=1, H=8, K=128, V=128, device="cuda")


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=UUID))
    # As if no bindings were installed, wherever this runs.
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(gpu_state, "_failed", set())


@pytest.fixture
def smi(card: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a program called nvidia-smi on the path that answers what it is told, and keeps what it was asked."""

    def put(answer: str) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n{answer}\n')
        program.chmod(0o755)

    monkeypatch.setenv("PATH", str(tmp_path))
    return put


def test_clocks_from_nvidia_smi(smi: Callable[[str], None], tmp_path: Path) -> None:
    smi('echo "570.86.15, 1980, 3201, 1980, 3201"')
    assert read_gpu(GPU) == GpuState("570.86.15", 1980, 3201, 1980, 3201)
    asked = (tmp_path / "asked").read_text()
    assert f"--id=GPU-{UUID}" in asked
    assert "--query-gpu=driver_version,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem" in asked


def test_a_clock_that_a_card_does_not_have(smi: Callable[[str], None]) -> None:
    smi('echo "570.86.15, [N/A], 3201, 1980, [N/A]"')
    assert read_gpu(GPU) == GpuState("570.86.15", None, 3201, 1980, None)


@pytest.mark.parametrize("answer", ["exit 9", "echo nonsense", "echo 1,2,3,4,5,6,7"])
def test_a_card_that_does_not_answer(answer: str, smi: Callable[[str], None]) -> None:
    smi(answer)
    assert read_gpu(GPU) == UNKNOWN


@pytest.mark.usefixtures("card")
def test_neither_way_is_there() -> None:
    assert read_gpu(GPU) == UNKNOWN
    assert read_gpu(CPU) == UNKNOWN


@pytest.mark.usefixtures("card")
def test_clocks_from_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    bindings = SimpleNamespace(
        NVML_CLOCK_SM=1,
        NVML_CLOCK_MEM=2,
        nvmlInit=lambda: calls.append("init"),
        nvmlShutdown=lambda: calls.append("shutdown"),
        nvmlDeviceGetHandleByUUID=lambda uuid: calls.append(uuid),
        nvmlSystemGetDriverVersion=lambda: b"550.1",
        nvmlDeviceGetClockInfo=lambda handle, kind: 1000 * kind,
        nvmlDeviceGetMaxClockInfo=lambda handle, kind: 1500 * kind,
    )
    monkeypatch.setitem(sys.modules, "pynvml", bindings)
    assert read_gpu(GPU) == GpuState("550.1", 1000, 2000, 1500, 3000)
    assert calls == ["init", f"GPU-{UUID}", "shutdown"]


def test_the_environment_names_options_variables_and_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LA_BACKEND", "ref")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/home/somebody")
    environment = read_environment(CPU, seed=0, quick=True, options="--quick")
    assert (environment.options, environment.driver, environment.max_sm_mhz) == ("--quick", None, None)
    assert environment.variables is not None
    assert "LA_BACKEND=ref" in environment.variables
    assert "somebody" not in environment.variables
    assert environment.sources == {name: source_hash(name) for name in ("la_core", "la_bench")}


@pytest.mark.parametrize(
    ("variable", "state"),
    [("", (None, None)), ("0123abcd", ("0123abcd", False)), ("0123abcd-dirty", ("0123abcd", True))],
)
def test_the_commit_can_be_handed_over_where_there_is_no_checkout(
    variable: str, state: tuple[str | None, bool | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LA_BENCH_COMMIT", variable)
    assert git_state(tmp_path) == state


@pytest.mark.skipif(shutil.which("git") is None, reason="not run: git is not installed")
def test_a_checkout_knows_its_commit_better(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bench" / "src" / "la_bench").mkdir(parents=True)
    who = ("-c", "user.name=Somebody", "-c", "user.email=somebody@example.com")
    for arguments in (("init", "--quiet"), (*who, "commit", "--quiet", "--allow-empty", "--message", "The first")):
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True)
    monkeypatch.setenv("LA_BENCH_COMMIT", "handed-over")
    commit, dirty = git_state(tmp_path / "bench")
    assert commit is not None
    assert re.fullmatch("[0-9a-f]{40}", commit)
    assert dirty is False
    (tmp_path / "new").touch()
    assert git_state(tmp_path) == (commit, True)


@pytest.mark.parametrize(
    "words",
    [
        "",
        "--quick --grid 8,16x1,64 --peer sglang=seg_la.py --state-dtype bfloat16 --layout kv --seed 3",
        "--grid 8x1 --dtype float16 --state-dtype float16 --device cpu",
        "--backends ref,triton --workloads ring,minicpm-sala/heavy --peers none",
    ],
)
def test_options_in_words_are_those_that_were_given(words: str) -> None:
    options = _parser().parse_args(["compare", *words.replace("=seg", "=/home/somebody/seg").split()])
    assert options_in_words(options, _grid_points(options, CPU)) == words


def test_tune_names_its_options() -> None:
    options = _parser().parse_args(["tune", "--op", "verify", "--tiles", "8,16x2", "--units", "8,16", "--overlap"])
    words = "--op verify --backend triton --tiles 8,16x2 --layout vk --state-dtype float32 --overlap --units 8,16"
    assert tune_words(options) == words


def test_rows_of_a_gpu_hold_its_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(la_bench.timing.COPY_BYTES, "cpu", 8 << 20)
    monkeypatch.setattr(la_bench.comparison, "read_gpu", lambda device: GpuState("570", 1755, 3201, 1980, 3201))
    points = [GridPoint(2, 1, device_type="cpu")]
    (row,) = run_grid(
        points,
        [BackendVariant("ref")],
        CPU,
        read_environment(CPU, seed=0, quick=True),
        replace(GRID_QUICK, seconds=0.01),
    )
    assert row.result is not None
    assert (row.result.sm_mhz, row.result.memory_mhz) == (1755, 3201)
    assert from_json_lines(to_json_lines([row])) == [row]


@pytest.mark.parametrize("backend", ["triton", "cute"])
def test_backends_tell_their_tiles(backend: str) -> None:
    tiles = chosen_tiles(f"la_{backend}", PROBLEM)
    assert tiles is not None
    assert "block_v=" in tiles
    assert "num_warps=" in tiles
    small, large = (chosen_tiles(f"la_{backend}", replace(PROBLEM, B=B)) for B in (1, 512))
    assert small != large


def test_a_backend_without_tiles() -> None:
    assert chosen_tiles("la_ref", PROBLEM) is None
    assert chosen_tiles("never_heard_of", PROBLEM) is None
    assert show_tiles("as is") == "as is"


def test_the_report_holds_all_of_it(make_row: Callable[..., Row]) -> None:
    row = make_row(backend="triton", grid=(8, 1))
    assert row.result is not None
    environment = replace(
        row.environment, driver="570.86.15", options="--quick", sources={"la_core": "c0ffee", "la_bench": None}
    )
    rows = [
        replace(
            row, environment=environment, result=replace(row.result, tiles="block_v=4", sm_mhz=mhz, memory_mhz=3201)
        )
        for mhz in (1755, 1980)
    ]
    report = render_report(rows)["report.md"]
    assert "| driver | 570.86.15 |" in report
    assert "| sm_mhz while timed | 1755 to 1980 |" in report
    assert "| memory_mhz while timed | 3201 |" in report
    assert "| la_core | la-core 0.1.0 | c0ffee |" in report
    assert "| la_bench | la-bench 0.1.0 | - |" in report
    assert "| triton | block_v=4 | H8/B1" in report
    assert "| options | --quick |" in report
    old = render_report([make_row(grid=(8, 1))])["report.md"]
    assert "while timed" not in old
    assert "Tiles: chosen" not in old
