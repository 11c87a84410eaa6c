"""Pages made from records: which run counts, and what the tables say."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from la_bench.first_call import FirstCall, first_json_lines
from la_bench.record_pages import card_page, cards, newest_grids, newest_suites, readme_table, speed_table
from la_bench.records import read_records
from la_bench.rows import KernelsMade, Row, to_json_lines

MakeRow = Callable[..., Row]


def measured(row: Row, utc: str, *, quick: bool = False, dtype: str = "float32") -> Row:
    environment = replace(row.environment, utc=utc, quick=quick, device="cuda", machine="A Card")
    return replace(row, environment=environment, workload=replace(row.workload, state_dtype=dtype))


def put(folder: Path, file: str, rows: Sequence[Row]) -> None:
    path = folder / "a-card" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(to_json_lines(rows))


def newest(folder: Path) -> list[tuple[str, tuple[str, ...]]]:
    return [(run.file.removeprefix("a-card/"), run.newest_of) for run in newest_grids(folder, "a-card")]


@pytest.fixture
def triton(make_row: MakeRow) -> Row:
    return make_row(backend="triton", time_us=2.0, grid=(8, 1))


@pytest.fixture
def cute(make_row: MakeRow) -> Row:
    return make_row(backend="cute", time_us=1.9, grid=(8, 1))


def test_one_run_that_has_all_backends_replaces_older_ones(tmp_path: Path, triton: Row, cute: Row) -> None:
    put(tmp_path, "one/grid.jsonl", [measured(triton, "2026-01-01")])
    put(tmp_path, "two/grid.jsonl", [measured(triton, "2026-01-02"), measured(cute, "2026-01-02")])
    assert newest(tmp_path) == [("two/grid.jsonl", ("cute", "triton"))]


def test_a_run_of_one_backend_leaves_the_newest_of_the_others(tmp_path: Path, triton: Row, cute: Row) -> None:
    put(tmp_path, "one/grid.jsonl", [measured(triton, "2026-01-01")])
    put(tmp_path, "two/grid.jsonl", [measured(cute, "2026-01-02")])
    assert newest(tmp_path) == [("two/grid.jsonl", ("cute",)), ("one/grid.jsonl", ("triton",))]


def test_a_full_run_counts_before_a_later_quick_one(tmp_path: Path, triton: Row, cute: Row) -> None:
    put(tmp_path, "one/grid.jsonl", [measured(triton, "2026-01-01")])
    put(tmp_path, "two/grid-quick.jsonl", [measured(row, "2026-01-02", quick=True) for row in (triton, cute)])
    assert newest(tmp_path) == [("one/grid.jsonl", ("triton",)), ("two/grid-quick.jsonl", ("cute",))]


def test_other_states_are_runs_of_their_own(tmp_path: Path, triton: Row) -> None:
    put(tmp_path, "two/grid-bf16.jsonl", [measured(triton, "2026-01-02", dtype="bfloat16")])
    put(tmp_path, "one/grid.jsonl", [measured(triton, "2026-01-01")])
    assert [file for file, _ in newest(tmp_path)] == ["one/grid.jsonl", "two/grid-bf16.jsonl"]
    assert "grid-bf16.jsonl" not in readme_table(tmp_path)
    assert "## Decode, bfloat16 states, vk: triton" in card_page(tmp_path, "a-card")


def test_steps_of_more_layers_are_runs_of_their_own(tmp_path: Path, make_row: MakeRow) -> None:
    row = make_row(backend="triton", time_us=2.0, grid=(8, 1))
    for layers, when in ((4, "2026-01-02"), (1, "2026-01-01")):
        facts = replace(row.workload, op="verify", drafts=4, layers=layers)
        put(tmp_path, f"one/verify-{layers}.jsonl", [replace(measured(row, when), workload=facts, window=16)])
    runs = newest_grids(tmp_path, "a-card", "verify")
    assert [(run.file, run.which) for run in runs] == [
        (f"a-card/one/verify-{layers}.jsonl", f"float32 states, vk, T = 4, L = {layers}") for layers in (1, 4)
    ]


@pytest.fixture
def rows(make_row: MakeRow) -> list[Row]:
    """Two ways to 16 states in a call, and one to 8; a backend that was not there, a peer that fails once."""
    rows = []
    for heads, batch in ((8, 1), (8, 2), (16, 1)):
        grid = (heads, batch)
        rows += [
            make_row(backend="triton", time_us=2.0 * batch, grid=grid),
            make_row(backend="triton+overlap", time_us=1.0 * batch, grid=grid),
            make_row(backend="cute", time_us=1.9 * batch, grid=grid),
            make_row(backend="cute+overlap", time_us=1.25 * batch, grid=grid),
            make_row(backend="ref", status="unavailable", reason="not here", grid=grid),
            make_row(backend="in-place floor", time_us=1.8, kind="floor", grid=grid),
            make_row(backend="sglang", time_us=5.0 * batch, kind="peer", grid=grid),
            make_row(backend="cula", time_us=9.5, kind="peer", grid=grid),
            make_row(backend="fla", time_us=11.0, kind="peer", grid=grid),
            make_row(backend="torch-naive", time_us=4.5, kind="peer", grid=grid),
        ]
    return rows


def test_the_table_of_speeds(rows: list[Row]) -> None:
    table = speed_table(rows)
    assert table.columns == (
        *("H", "B", "cute", "cute+overlap", "triton", "triton+overlap", "best public kernel", "in-place floor"),
        *("vs public", "with overlap"),
    )
    assert table.rows == (
        ("8", "1", "1.90", "1.25", "2.00", "1.00", "5.00 (sglang)", "1.80", "2.63x", "5.00x"),
        ("8", "2", "3.80", "2.50", "4.00", "2.00", "9.50 (cula)", "1.80", "2.50x", "4.75x"),
    )


def test_plain_torch_is_no_public_kernel(tmp_path: Path, rows: list[Row]) -> None:
    put(tmp_path, "one/grid.jsonl", rows)
    table = readme_table(tmp_path)
    assert "Public kernels in this run: sglang, cula, fla. From" in table
    assert "torch-naive" not in table
    assert "torch-naive" in card_page(tmp_path, "a-card")
    alone = [row for row in rows if row.backend.kind != "peer" or row.backend.name == "torch-naive"]
    column = speed_table(alone).columns.index("best public kernel")
    assert {line[column] for line in speed_table(alone).rows} == {"-"}


def test_what_the_best_public_kernels_do_otherwise_stands_under_the_table(tmp_path: Path, rows: list[Row]) -> None:
    notes = {"cula": "Ignores s_offsets.", "sglang": "Allocates its output.", "fla": "Has no pool."}
    put(
        tmp_path,
        "one/grid.jsonl",
        [replace(row, backend=replace(row.backend, note=notes.get(row.backend.name))) for row in rows],
    )
    assert readme_table(tmp_path).endswith("- **sglang**: Allocates its output.\n- **cula**: Ignores s_offsets.")


def test_a_run_of_older_sources_than_the_newest_record_says_so(
    tmp_path: Path, make_row: MakeRow, triton: Row, cute: Row
) -> None:
    def of(row: Row, source_hash: str) -> Row:
        return replace(row, backend=replace(row.backend, source_hash=source_hash))

    bf16 = [measured(of(row, "old"), "2026-01-01", dtype="bfloat16") for row in (triton, cute)]
    put(tmp_path, "one/grid-bf16.jsonl", bf16)
    facts = replace(cute.workload, op="verify", drafts=4, layers=1)
    window = replace(cute, workload=facts, window=16)
    put(tmp_path, "one/verify.jsonl", [measured(of(window, "old"), "2026-01-01")])
    put(tmp_path, "two/grid.jsonl", [measured(of(row, "new"), "2026-01-02") for row in (triton, cute)])
    put(tmp_path, "three/grid.jsonl", [measured(of(cute, "newer"), "2026-01-03")])
    marks = re.findall(r"^\*\*(.*)\*\*$", card_page(tmp_path, "a-card"), re.MULTILINE)
    assert marks == [
        "a-card/two/grid.jsonl ran on older sources of cute than a-card/three, their newest record.",
        "a-card/one/grid-bf16.jsonl ran on older sources of triton than a-card/two, their newest record.",
        "a-card/one/grid-bf16.jsonl ran on older sources of cute than a-card/three, their newest record.",
        "a-card/one/verify.jsonl ran on older sources of cute than a-card/three, their newest record.",
    ]
    assert f"**{marks[0]}**" in readme_table(tmp_path)
    assert "older sources" not in readme_table(tmp_path).split(marks[0])[0]


def test_a_point_without_peers_or_times_has_dashes(make_row: MakeRow) -> None:
    rows = [
        make_row(backend="triton", time_us=2.0, grid=(8, 1)),
        make_row(backend="triton", status="failed", reason="off", grid=(8, 2)),
    ]
    assert speed_table(rows).rows == (
        ("8", "1", "2.00", "-", "-", "-"),
        ("8", "2", "-", "-", "-", "-"),
    )


def test_the_newest_suite_of_each_backend(tmp_path: Path) -> None:
    for run, day, outcomes in (
        ("one", "01", {"ref-cpu": {"passed": ["a"]}, "triton-cuda": {"passed": ["a", "b"], "failed": ["c"]}}),
        ("two", "02", {"triton-cuda": {"passed": ["a", "b", "c"]}}),
    ):
        folder = tmp_path / "a-card" / run
        folder.mkdir(parents=True)
        environment = {"date": f"2026-01-{day}T00:00:00", "torch": "2.11.0"}
        (folder / "suite-x.json").write_text(json.dumps({"environment": environment, "outcomes": outcomes}))
    suites = newest_suites(tmp_path, "a-card")
    assert [(run.target, run.file, run.counts) for run in suites] == [
        ("triton-cuda", "a-card/two/suite-x.json", {"passed": 3}),
        ("ref-cpu", "a-card/one/suite-x.json", {"passed": 1}),
    ]
    page = card_page(tmp_path, "a-card")
    assert "| triton-cuda | a-card/two/suite-x.json | 2026-01-02 | 2.11.0 | 3 | 0 | 0 |" in page


def test_names_of_files_and_corrections_make_no_second_line_of_a_suite(tmp_path: Path) -> None:
    for run, file, day, outcomes in (
        ("one", "suite-cute-prebuilt.json", "01", {"cute-cuda": {"passed": ["a"]}}),
        ("two", "suite-cute.json", "02", {"cute-cuda": {"passed": ["a", "b"]}}),
        ("two", "suite-ref.json", "02", {"ref-cpu": {"passed": ["a", "b"]}}),
        ("two-corrected", "suite-ref.json", "02", {"ref-cpu": {"passed": ["a"]}, "ref-cuda": {"passed": ["b"]}}),
    ):
        path = tmp_path / "a-card" / run / file
        path.parent.mkdir(parents=True, exist_ok=True)
        environment = {"date": f"2026-01-{day}T00:00:00", "torch": "2.11.0"}
        path.write_text(json.dumps({"environment": environment, "outcomes": outcomes}))
    assert [(run.target, run.file.removeprefix("a-card/")) for run in newest_suites(tmp_path, "a-card")] == [
        ("cute-cuda", "two/suite-cute.json"),
        ("ref-cpu", "two-corrected/suite-ref.json"),
        ("ref-cuda", "two-corrected/suite-ref.json"),
    ]


def test_the_newest_first_calls_of_each_backend_and_mode(tmp_path: Path, make_row: MakeRow) -> None:
    def calls(backend: str, mode: str, first: float, fault: str | None = None) -> FirstCall:
        samples: list[float] = [] if fault else [first]
        return FirstCall(backend, mode, {"rest": samples}, samples, [1.0] * len(samples), {"compiled": 1}, fault)

    for run, utc, results in (
        ("one", "2026-01-01", [calls("cute", "installed", 9.0), calls("cute", "cold", 900.0)]),
        ("two", "2026-01-02", [calls("cute", "installed", 8.0), calls("cute", "cold", 0.0, "no compiler")]),
        ("two", "2026-01-02", [calls("triton", "warm", 20.0)]),
    ):
        file = tmp_path / "a-card" / run / f"first-{results[0].backend}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(first_json_lines(results, "ab", measured(make_row(), utc).environment))
    page = card_page(tmp_path, "a-card")
    _, section = page.split("## The first call of a process")
    assert re.findall(
        r"^(2026\S+), from a-card/(\S+):|^\| (cute|triton) \| (\w+) \| (\S+) \|", section, re.MULTILINE
    ) == [
        ("2026-01-02", "two/first-cute.jsonl", "", "", ""),
        ("", "", "cute", "installed", "8.00"),
        ("2026-01-02", "two/first-triton.jsonl", "", "", ""),
        ("", "", "triton", "warm", "20.0"),
        ("2026-01-01", "one/first-cute.jsonl", "", "", ""),
        ("", "", "cute", "cold", "900"),
    ]
    assert section.count("| backend | mode |") == 3
    newer = next(record for record in read_records(tmp_path) if record.run == "two")
    assert [file.what for file in newer.files] == ["first calls: cute installed", "first calls: triton warm"]


def test_kernels_made_are_on_the_page(tmp_path: Path, triton: Row) -> None:
    put(tmp_path, "one/grid.jsonl", [replace(measured(triton, "2026-01-01"), kernels=KernelsMade(3, 1.5, None))])
    assert "| triton | not told | 3 | 1.500 |" in card_page(tmp_path, "a-card")


def test_the_same_records_give_the_same_bytes(tmp_path: Path, rows: list[Row]) -> None:
    put(tmp_path, "one/grid.jsonl", [measured(row, "2026-01-01") for row in rows])
    assert cards(tmp_path) == ["a-card"]
    assert card_page(tmp_path, "a-card") == card_page(tmp_path, "a-card")
    page = card_page(tmp_path, "a-card")
    assert "## Decode, float32 states, vk: cute, triton" in page
    assert "| B | copy floor | triton | triton+overlap | cute | cute+overlap |" in page
    assert "| cute+overlap | 2.0e-03 | 2.0e-03 | 4.0e-08 | 4.0e-08 |" in page
    assert readme_table(tmp_path).count("\n|") == 4
