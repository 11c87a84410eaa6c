"""A grid of sizes: how it is written, planned, judged, run and reported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import la_bench.grid
import la_bench.timing
from la_bench.cli import _parser, main
from la_bench.compare_command import _grid_points
from la_bench.environment import read_environment
from la_bench.grid import GRID_FULL, MAX_CALLS, MIN_CALLS, POOL_ELEMENTS, GridPoint, estimate_seconds, in_words
from la_bench.grid_spec import DEFAULT_GRID, parse_grid
from la_bench.peers.cula import CulaPeer
from la_bench.report_grid import host_table, memory_table, ratio_table, time_table
from la_bench.rows import Row, from_json_lines
from la_bench.run_grid import GridTensors, run_grid
from la_bench.tensors import DecodeCall
from la_bench.timing import Effort
from la_bench.variants import backend_variants
from la_bench.workloads import select_workloads
from la_bench.write_report import render_report
from la_core import decode_problem

CPU = torch.device("cpu")
TINY = Effort(seconds=0.05, min_rounds=3, max_rounds=3)
DEFAULT = [GridPoint(H, B) for H, B in parse_grid(DEFAULT_GRID)]
VARIANTS = (
    *("triton", "triton+overlap", "cute", "cute+overlap", "in-place floor", "in-place floor+overlap"),
    *("cula", "sglang", "vllm", "fla", "torch-naive"),
)

MakeRow = Callable[..., Row]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(la_bench.grid.LAP_BYTES, "cpu", 1 << 20)
    monkeypatch.setitem(la_bench.timing.COPY_BYTES, "cpu", 8 << 20)


def run(points: list[GridPoint], *backends: str) -> list[Row]:
    variants = backend_variants(backends, None)
    return run_grid(points, variants, CPU, read_environment(CPU, seed=0, quick=True), TINY)


def test_a_grid_is_heads_by_rows() -> None:
    assert parse_grid("8,16x1,64") == ((8, 1), (8, 64), (16, 1), (16, 64))
    assert parse_grid("8X4,4") == ((8, 4),)
    assert len(DEFAULT) == 40


@pytest.mark.parametrize("text", ["", "8", "8x", "8x1x2", "0x1", "8x-1", "axb", "8,x1"])
def test_what_is_not_a_grid(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"invalid literal|not heads x rows"):
        parse_grid(text)
    with pytest.raises(SystemExit):
        main(["compare", "--device", "cpu", "--grid", text])
    assert "must be heads x rows such as 8,16x1,64" in capsys.readouterr().err


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_every_lap_is_cold_bounded_and_addressable(state_dtype: torch.dtype) -> None:
    for H, B in parse_grid(DEFAULT_GRID):
        point = GridPoint(H, B, state_dtype)
        assert MIN_CALLS <= point.calls <= MAX_CALLS
        assert point.fits
        assert point.slots * H * 128 * 128 <= POOL_ELEMENTS["cuda"]
        # All that a lap touches, before it is touched again: more than an L2 of 60 MB holds.
        assert point.chunks * point.state_bytes > 60 << 20
        assert point.chunks >= 2


def test_the_default_grid_takes_less_than_eight_minutes() -> None:
    seconds = sum(estimate_seconds(point, VARIANTS, GRID_FULL) for point in DEFAULT)
    assert 60 < seconds < 480
    assert estimate_seconds(DEFAULT[0], VARIANTS, GRID_FULL) > estimate_seconds(DEFAULT[0], VARIANTS[:2], GRID_FULL)
    assert (in_words(0.2), in_words(75), in_words(200)) == ("1 s", "75 s", "3 min")


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("layout", ["vk", "kv"])
def test_laps_make_legal_calls_on_distinct_slots(layout: str) -> None:
    points = [GridPoint(2, 3, layout=layout, device_type="cpu"), GridPoint(4, 1, layout=layout, device_type="cpu")]  # type: ignore[arg-type]
    tensors = GridTensors(points, CPU, seed=0)
    for point in points:
        lap = tensors.lap(point)
        assert len(lap) == point.calls
        first = [slot for call in lap[: point.chunks] for slot in call.s_offsets.tolist()]
        assert sorted(first) == list(range(point.slots))
        assert first != sorted(first)
        for call in lap:
            problem = decode_problem(call.q, call.k, call.v, call.s, call.s_offsets, call.decay_scales, call.out)
            assert (point.B, point.slots, point.H) == (problem.B, problem.P, problem.H)
            assert problem.state_layout == call.layout == layout
            assert call.s_offsets.data_ptr() % 16 == 0
            assert call.window + point.B <= point.slots
            assert call.in_layout("kv").in_layout("vk").s.is_contiguous()
            assert call.in_layout("kv").s.data_ptr() == call.s.data_ptr()


@pytest.mark.usefixtures("small")
def test_rows_of_a_grid() -> None:
    rows = run([GridPoint(2, 1, device_type="cpu"), GridPoint(2, 9, device_type="cpu")], "ref", "never-heard-of")
    assert [(row.workload.name, row.backend.name, row.status) for row in rows] == [
        ("H2/B1", "ref", "ok"),
        ("H2/B1", "never-heard-of", "unavailable"),
        ("H2/B9", "ref", "ok"),
        ("H2/B9", "never-heard-of", "unavailable"),
    ]
    assert all(row.workload.grid for row in rows)
    result = rows[0].result
    assert result is not None
    assert 0 < result.state_error < 1e-6
    assert (result.speedup_vs_ref, result.speedup_vs_peer, result.share_of_floor, result.host_us) == (1, *[None] * 3)


@pytest.mark.usefixtures("small")
def test_a_wrong_backend_has_no_time(install: Callable[[object], None], made_up: SimpleNamespace) -> None:
    install(made_up.Wrong())
    wrong, ref = run([GridPoint(2, 3, device_type="cpu")], "wrong", "ref")
    assert (wrong.status, wrong.result) == ("failed", None)
    assert "state of" in str(wrong.reason)
    assert ref.status == "ok"


@pytest.mark.usefixtures("small")
def test_ctrl_c_keeps_the_points_that_are_done(install: Callable[[object], None], made_up: SimpleNamespace) -> None:
    interrupting = made_up.Interrupting()
    # The gate and two calls for memory, then four calls a walk: a warm-up and three rounds.
    interrupting.good_calls = 3 + 4 * 4
    install(interrupting)
    rows = run([GridPoint(2, 1, device_type="cpu"), GridPoint(2, 2, device_type="cpu")], "interrupting")
    assert [row.status for row in rows] == ["ok", "interrupted"]


@pytest.fixture
def rows(make_row: MakeRow) -> list[Row]:
    """Two points: a floor, two variants of ours, one peer that is wrong once."""
    rows = []
    for B in (1, 512):
        rows += [
            make_row(backend="triton", time_us=2.0, against=(1.2, 0.9), host_us=7.0 + B, grid=(8, B)),
            make_row(backend="triton+overlap", time_us=1.0, against=(2.4, 0.8), host_us=7.0, grid=(8, B)),
            make_row(backend="in-place floor", time_us=1.8, kind="floor", grid=(8, B)),
            make_row(backend="sglang", time_us=2.4, kind="peer", against=(1.0, 0.75), host_us=41.0, grid=(8, B)),
        ]
    rows.append(make_row(backend="cula", status="failed", reason="out of 8 is off", kind="peer", grid=(8, 1)))
    rows.append(make_row(backend="cula", status="refused", reason="cula has no padding", kind="peer", grid=(8, 512)))
    return rows


def test_tables_of_a_grid(rows: list[Row], make_row: MakeRow) -> None:
    table = time_table(rows)
    assert table.columns == ("B", "copy floor", "triton", "triton+overlap", "in-place floor", "sglang", "cula")
    assert table.rows[0] == ("1", "3000", "2.00", "1.00", "1.80", "2.40", "FAILED")
    assert table.rows[1][-1] == "refused"
    ratios = ratio_table(rows)
    assert ratios is not None
    assert ratios.rows[0] == ("1", "sglang", "1.20x", "90 %", "2.40x", "80 %")
    floor = make_row(backend="in-place floor", kind="floor", host_us=1.0, grid=(8, 1))
    host = host_table([*rows, floor])
    assert host is not None
    assert host.rows[0] == ("triton", "264", "8.00 to 519")
    assert [line[0] for line in host.rows] == ["triton", "triton+overlap", "sglang"]


def test_the_report_of_a_grid_has_complete_tables(rows: list[Row], make_row: MakeRow) -> None:
    rows = [*rows, make_row(backend="triton", time_us=3.0, grid=(16, 4))]
    rows = [replace(row, result=row.result and replace(row.result, speedup_vs_ref=None)) for row in rows]
    files = render_report(rows)
    complete = files["report.md"].split("## All results\n")[1].split("\n## ")[0]
    assert "### H = 8: 9 rows" in complete
    assert "### H = 16: 1 row\n" in complete
    assert (
        "| B | variant | time | p20 to p80 | samples | GB/s | share of copy | copy floor | share of floor | "
        "vs fastest peer | host time | error of out | error of state | extra memory |"
    ) in complete
    assert "| 512 | triton | 2.00 us | 1.80 us to 2.40 us | 30 | 30000 | 150000 % | 3.00 ms | 90 % |" in complete
    assert "| 1 | cula | FAILED | - |" in complete
    # Refused: told under what was not timed.
    assert "| 512 | cula" not in complete
    assert complete.count("\n| ") == 9 + 1 + 2 * 2
    html = files["report.html"]
    assert html.count("<details>\n<summary>H = ") == 2
    assert html.index("Extra memory</h2>") < html.index("<details>") < html.index("What was not timed")


def test_extra_memory_of_a_grid(make_row: MakeRow) -> None:
    def needs(size: int, backend: str, B: int) -> Row:
        row = make_row(backend=backend, grid=(8, B))
        assert row.result is not None
        return replace(row, result=replace(row.result, extra_bytes=size))

    rows = [needs(0, "triton", 1), needs(1 << 20, "fla", 1), needs(0, "triton", 512), needs(3 << 29, "fla", 512)]
    assert memory_table(rows).rows == (
        ("triton", "0.0 MiB", "0.0 MiB", "all"),
        ("fla", "1.0 MiB", "1536.0 MiB", "H8/B512"),
    )
    assert "| fla | 1.0 MiB | 1536.0 MiB | H8/B512 |" in render_report(rows)["report.md"]


def test_the_summary_says_where_and_beside_whom(make_row: MakeRow) -> None:
    rows = [
        make_row(backend="triton", time_us=2.0, against=(1.2, 0.9), grid=(8, 1)),
        make_row(backend="sglang", time_us=2.4, kind="peer", grid=(8, 1)),
        make_row(backend="triton", time_us=4.0, against=(0.9, 1.02), grid=(8, 2)),
        make_row(backend="sglang", time_us=9.0, kind="peer", grid=(8, 2)),
        make_row(backend="cula", time_us=3.6, kind="peer", grid=(8, 2)),
    ]
    assert (
        "triton is 0.90x (H8/B2) to 1.20x (H8/B1) as fast as the fastest peer (sglang, cula) and at 90 % (H8/B1) "
        "to 102 % (H8/B2) of the in-place floor."
    ) in render_report(rows)["report.md"]


def test_the_summary_has_the_lead_without_overlap_too(rows: list[Row]) -> None:
    summary = render_report([replace(r, backend=replace(r.backend, overlap="+" in r.backend.name)) for r in rows])
    lines = summary["report.md"].split("## Plots")[0]
    assert "| share of floor | vs fastest peer | the same without overlap |" in lines
    assert "| 8 | 1 | triton+overlap | 1.00 | 300000 % | 80 % | 2.40x | 1.20x |" in lines
    assert "Peers that were timed: sglang; not timed: cula." in lines


@pytest.mark.parametrize(
    ("peers", "sentence"),
    [
        (("torch-naive",), "torch-naive. torch-naive is plain torch: no public kernel was timed."),
        (("cula", "torch-naive"), "cula, torch-naive. torch-naive is plain torch, the others are public kernels."),
        (("cula",), "cula."),
        ((), None),
    ],
    ids=["torch", "both", "public", "none"],
)
def test_plain_torch_is_no_public_kernel(peers: tuple[str, ...], sentence: str | None, make_row: MakeRow) -> None:
    ours = make_row(backend="triton", time_us=2.0, against=(3.0, 0.9) if peers else None, grid=(8, 1))
    text = render_report([ours, *(make_row(backend=name, kind="peer", time_us=6.0, grid=(8, 1)) for name in peers)])
    summary = text["report.md"].split("## Plots")[0]
    assert "best peer" not in text["report.md"]
    if sentence is None:
        assert "Peers that were timed" not in summary
    else:
        assert f"Peers that were timed: {sentence}\n" in summary
        assert f"as fast as the fastest peer ({peers[0]})" in summary


def test_doubts_are_reported_for_a_grid_too(make_row: MakeRow) -> None:
    row = make_row(grid=(8, 1))
    assert row.result is not None
    warm = replace(row.workload, reuse_bytes=1 << 20)
    wide = replace(row, workload=warm, result=replace(row.result, time_us_p80=5 * row.result.time_us_p20))
    summary = render_report([wide])["report.md"].split("## H = 8")[0]
    assert "the median says little: ref on H8/B1." in summary
    assert "On H8/B1 part of the states is found in the machine's cache" in summary


def test_a_floor_with_overlap_that_is_slower_is_reported(make_row: MakeRow) -> None:
    rows = [
        make_row(backend=name, kind="floor", time_us=time_us, grid=(16, B))
        for B, with_overlap in ((8, 9.0), (16, 11.28))
        for name, time_us in (("in-place floor", 10.32), ("in-place floor+overlap", with_overlap))
    ]
    summary = render_report(rows)["report.md"].split("## H = 16")[0]
    assert "On H16/B16 the in-place floor with overlap took longer than the one without" in summary
    assert "took longer" not in render_report(rows[:2])["report.md"]


@pytest.mark.parametrize(("device", "scattered"), [("cpu", False), ("cuda", True)])
def test_times_of_a_gpu_scatter_less(device: str, scattered: bool, make_row: MakeRow) -> None:
    # Rows made up for tests have a p80 of 1.33 times p20.
    row = make_row(backend="in-place floor+overlap", kind="floor", grid=(16, 16))
    row = replace(row, environment=replace(row.environment, device=device))
    sentence = "(p80 above 1.1 times p20), so the median says little: in-place floor+overlap on H16/B16."
    assert (sentence in render_report([row])["report.md"]) is scattered


@pytest.mark.usefixtures("small")
def test_a_point_that_cannot_be_set_up_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = GridTensors.lap

    def lap(self: GridTensors, point: GridPoint) -> list[DecodeCall]:
        if point.B == 2:
            raise RuntimeError("no memory left")
        return whole(self, point)

    monkeypatch.setattr(GridTensors, "lap", lap)
    rows = run([GridPoint(2, B, device_type="cpu") for B in (1, 2, 3)], "ref")
    assert [(row.status, row.reason) for row in rows] == [
        ("ok", None),
        ("error", "RuntimeError: no memory left"),
        ("ok", None),
    ]


def test_the_report_of_a_grid(rows: list[Row]) -> None:
    files = render_report(rows)
    plots = {f"{name}.svg" for name in ("share_of_copy_H8", "time_H8", "host_time", "accuracy")}
    assert set(files) == {"report.md", "report.html", "rows.jsonl", *plots}
    text = files["report.md"]
    sentence = (
        "triton+overlap is 2.40x as fast as the fastest peer (sglang) and at 80 % of the in-place floor with overlap."
    )
    assert sentence in text
    assert "workload" not in text.split("## What was not timed")[0]
    assert "another layer's pool" not in text
    assert "**FAILED: cula on H8/B1. First: out of 8 is off**" in text
    assert "- **sglang**: Differs." in text
    assert "| cula | refused | H8/B512 | cula has no padding |" in text
    assert "## H = 8" in text
    assert "## Host time" in text
    assert from_json_lines(files["rows.jsonl"]) == rows


@pytest.mark.usefixtures("small")
def test_a_grid_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--device", "cpu", "--quick", "--grid", "2x1,2", "--peers", "torch-naive", "--out", str(tmp_path)]
    assert main(["compare", *arguments, "--layout", "kv", "--state-dtype", "bfloat16"]) == 0
    printed = capsys.readouterr().out
    assert "2 points x 4 variants, about " in printed
    assert "Ctrl-C keeps what is done." in printed
    rows = from_json_lines((tmp_path / "rows.jsonl").read_text())
    ok = {row.backend.name for row in rows if row.status == "ok"}
    assert ok == {"ref", "torch-naive"}
    assert {(row.workload.state_dtype, row.workload.state_layout) for row in rows} == {("bfloat16", "kv")}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--layout", "kv"], "--dtype, --state-dtype and --layout belong to --grid"),
        (["--grid", "8x1", "--workloads", "ring"], "--grid and --workloads are two kinds of runs"),
        (["--grid", "64x100000"], "the states of H64/B100000 do not fit"),
        (["--peers", "nonsense"], "no peer is called 'nonsense'"),
        (["--peer", "cula=/no/such/file"], "there is no such file or folder"),
    ],
    ids=["layout", "both", "large", "peer", "path"],
)
def test_wrong_options(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--device", "cpu", *arguments]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "device", "points"),
    [
        ([], "cuda", 40),
        (["--quick"], "cuda", 8),
        (["--grid"], "cuda", 40),
        (["--grid", "--quick"], "cuda", 8),
        (["--grid"], "cpu", 6),
        (["--grid", "--quick"], "cpu", 2),
        (["--grid", "--state-dtype", "bfloat16"], "cpu", 6),
        (["--quick", "--layout", "kv"], "cuda", 8),
        (["--workloads", "all"], "cuda", 0),
        (["--grid", "8x1"], "cuda", 1),
        ([], "cpu", 0),
        (["--grid", "8x1,2"], "cpu", 2),
    ],
)
def test_a_gpu_runs_the_grid_unless_something_else_is_asked_for(arguments: list[str], device: str, points: int) -> None:
    options = _parser().parse_args(["compare", *arguments])
    assert len(_grid_points(options, torch.device(device))) == points


def test_all_is_every_workload() -> None:
    assert select_workloads("cuda", ("all",), quick=False) == select_workloads("cuda", (), quick=False)


def test_the_dtype_of_q_k_v_and_out_is_an_option(tmp_path: Path) -> None:
    arguments = ["--device", "cpu", "--quick", "--grid", "2x1", "--dtype", "float16", "--backends", "ref"]
    assert main(["compare", *arguments, "--out", str(tmp_path)]) == 0
    (row,) = from_json_lines((tmp_path / "rows.jsonl").read_text())
    assert (row.status, row.workload.io_dtype, row.workload.out_dtype) == ("ok", "float16", "float16")


def test_a_peer_is_not_given_a_dtype_that_it_does_not_take() -> None:
    problem = GridPoint(2, 1, io_dtype=torch.float16).problem()
    peer = object.__new__(CulaPeer)
    assert peer.limits(problem, padded=False) == "does not take q, k and v in float16"
