"""`la-bench first` times first calls of fresh processes, in the state of caches that each mode promises."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import la_bench.first_call
import la_bench.first_call_process
from la_bench.cli import main
from la_bench.errors import UsageError
from la_bench.first_call import (
    FirstCall,
    ask_process,
    first_table,
    measure_first,
    modes_of,
    read_first_call,
    select_modes,
)
from la_bench.first_call_process import LATER_CALLS, first_call
from la_bench.variants import backend_facts
from la_core import DecodeProblem

Capture = pytest.CaptureFixture[str]

OPTIONS = {"backend": "ref", "package": "la_ref", "device": "cpu", "imports": []}


class Processes:
    """Answers like processes, whose first call takes 20, 21, ... ms and a later one 2 ms; remembers what they saw."""

    def __init__(self) -> None:
        self.seen: list[tuple[dict[str, Any], dict[str, str], int]] = []

    def __call__(self, options: Mapping[str, Any], variables: Mapping[str, str]) -> Mapping[str, Any]:
        folders = [Path(value) for value in variables.values() if os.sep in value]
        files = sum(len(list(folder.iterdir())) for folder in folders)
        for folder in folders:
            (folder / f"kernel{files}").write_text("")
        self.seen.append((dict(options), dict(variables), files))
        parts = {"discovery": 4.0, "library": 6.0, "rest": 9.0 + len(self.seen)}
        imported = ["wave"] if files else ["compiler", "wave"]
        return {"parts": parts, "later": [2.0, 1.0, 90.0], "imported": imported, "kernels": {"disk": 1}}


def test_modes_of_backends() -> None:
    assert modes_of("cute") == ("installed", "warm", "cold")
    assert modes_of("triton") == ("warm", "cold")
    assert modes_of("ref") == modes_of("never-heard-of") == ("installed",)
    assert select_modes("cute", ("cold", "installed", "cold")) == ("cold", "installed")
    with pytest.raises(UsageError, match="--modes of triton can be warm, cold; got 'installed'"):
        select_modes("triton", ("installed",))


def test_each_mode_finds_its_caches_as_it_promises() -> None:
    processes = Processes()
    results, _ = measure_first("cute", "la_cute", "cuda", ("installed", "warm", "cold"), 2, ask=processes)
    # It compiles, so what it imports is not what a call of that mode does.
    (_, fills_the_cache, _) = processes.seen.pop(1)
    assert fills_the_cache["LA_CUTE_CACHE_DIR"] == processes.seen[1][1]["LA_CUTE_CACHE_DIR"]
    seen = {mode: processes.seen[place::3] for place, mode in enumerate(("installed", "warm", "cold"))}
    for mode, calls in seen.items():
        # The first process does not count; it tells the others what to import.
        told = ["wave"] if mode == "warm" else ["compiler", "wave"]
        assert [options["imports"] for options, _, _ in calls] == [[], told, told]
        assert {variables["LA_CUTE_PREBUILT"] for _, variables, _ in calls} == {"1" if mode == "installed" else "0"}
        folders = [variables["LA_CUTE_CACHE_DIR"] for _, variables, _ in calls]
        assert len(set(folders)) == (1 if mode == "warm" else 3)
        assert [files for _, _, files in calls] == ([1, 2, 3] if mode == "warm" else [0, 0, 0])
        assert not any(Path(folder).exists() for folder in folders)
    assert [result.first for result in results] == [[24.0, 27.0], [25.0, 28.0], [26.0, 29.0]]
    assert results[0].later == [2.0, 2.0]
    assert results[0].beyond.median == 23.5


def test_caches_of_triton_and_of_none() -> None:
    processes = Processes()
    measure_first("triton", "la_triton", "cuda", ("cold",), 1, ask=processes)
    assert [set(variables) for _, variables, _ in processes.seen] == [{"TRITON_CACHE_DIR"}] * 2
    processes = Processes()
    measure_first("ref", "la_ref", "cpu", ("installed",), 1, ask=processes)
    assert [variables for _, variables, _ in processes.seen] == [{}] * 2


def test_a_mode_that_fails_leaves_the_others() -> None:
    processes = Processes()

    def ask(options: Mapping[str, Any], variables: Mapping[str, str]) -> Mapping[str, Any]:
        if variables["LA_CUTE_PREBUILT"] == "0":
            raise RuntimeError("there is no compiler")
        return processes(options, variables)

    (installed, warm), _ = measure_first("cute", "la_cute", "cuda", ("installed", "warm"), 2, ask=ask)
    assert (installed.fault, len(installed.first)) == (None, 2)
    assert (warm.fault, warm.first) == ("there is no compiler", [])
    assert [line[1] for line in first_table([installed, warm]).rows] == ["installed"]


def test_the_table() -> None:
    one, other = FirstCall("cute", "installed"), FirstCall("cute", "cold")
    one.add({"parts": {"discovery": 4.0, "library": 6.0, "rest": 5.0}, "later": [1.0], "kernels": {"prebuilt": 1}})
    other.add({"parts": {"discovery": 4.0, "rest": 500.0}, "later": [3.0], "kernels": {}})
    table = first_table([one, other])
    assert table.columns[-4:] == ("discovery", "library", "rest", "kernels")
    assert table.rows == (
        ("cute", "installed", "15.0", "15.0 to 15.0", "1.00", "14.0", "4.00", "6.00", "5.00", "1 prebuilt"),
        ("cute", "cold", "504", "504 to 504", "3.00", "501", "4.00", "-", "500", "-"),
    )
    assert "library" not in first_table([other]).columns


def test_a_process_tells_what_its_first_call_took_and_imported() -> None:
    rehearsal = ask_process(OPTIONS, {})
    assert "la_ref.backend" in rehearsal["imported"]
    answer = ask_process({**OPTIONS, "imports": [*rehearsal["imported"], "no.such.module"]}, {})
    assert answer["imported"] == []
    assert set(answer["parts"]) == {"discovery", "rest"}
    assert len(answer["later"]) == LATER_CALLS
    assert min(*answer["parts"].values(), *answer["later"]) > 0
    assert answer["kernels"] == {}


def test_a_process_that_fails_says_why() -> None:
    with pytest.raises(RuntimeError, match=r"UnsupportedByBackend: .*backend 'cute' runs cuda tensors, got cpu"):
        ask_process({**OPTIONS, "backend": "cute", "package": "la_cute"}, {})


def test_the_library_of_la_cute_is_a_part_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    prebuilt = pytest.importorskip("la_cute.prebuilt_kernels")
    asked: list[Any] = []

    def why_missing(key: Any) -> str | None:
        asked.append(key)
        return None

    problem = DecodeProblem.contiguous(B=4, P=8, H=16, K=128, V=128, device="cuda", arch=(9, 0))
    monkeypatch.setattr(la_bench.first_call_process, "decode_problem", lambda *tensors: problem)
    monkeypatch.setattr(prebuilt, "why_missing", why_missing)
    # Its call cannot be made here, so that of la-ref stands in for it.
    answer = first_call("ref", "la_cute", "cpu", [])
    assert list(answer["parts"]) == ["discovery", "library", "rest"]
    assert [(key.arch, key.aligned, key.K) for key in asked] == [("sm_90a", True, 128)]


def test_first_from_end_to_end(tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "first.jsonl"
    arguments = ["--backend", "ref", "--device", "cpu", "--samples", "2", "--max-ms", "1e9", "--out", str(out)]
    assert main(["first", *arguments]) == 0
    printed = capsys.readouterr().out
    assert "first decode call of a process" in printed
    (row,) = [json.loads(line) for line in out.read_text().splitlines()]
    assert (row["backend"], row["source_hash"]) == ("ref", backend_facts("ref").source_hash)
    assert row["environment"]["device"] == "cpu"
    assert row["environment"]["options"] == "--backend ref --samples 2 --device cpu"
    result = read_first_call(row)
    assert len(result.first) == len(result.later) == 2
    assert result.first == [sum(parts) for parts in zip(*result.parts.values(), strict=True)]
    for word in ("ref", "installed", "discovery", "rest"):
        assert word in printed
    assert "OVER THE LIMIT" not in printed


@pytest.mark.parametrize(("limit", "status"), [("18", 1), ("20", 0)])
def test_the_limit_is_on_what_a_later_call_does_not_take(
    limit: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    # First calls of 21 and 22 ms in the two processes that count, later ones of 2 ms: 19.5 ms beyond.
    monkeypatch.setattr(la_bench.first_call, "ask_process", Processes())
    arguments = ["--backend", "ref", "--device", "cpu", "--samples", "2", "--max-ms", limit]
    assert main(["first", *arguments]) == status
    printed = capsys.readouterr().out
    assert ("OVER THE LIMIT of 18 ms: installed: 19.5 ms beyond a later call" in printed) == (status == 1)


def test_a_process_that_fails_makes_the_exit_status_1(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def ask(options: Mapping[str, Any], variables: Mapping[str, str]) -> Mapping[str, Any]:
        raise RuntimeError("out of patience")

    monkeypatch.setattr(la_bench.first_call, "ask_process", ask)
    assert main(["first", "--backend", "ref", "--device", "cpu"]) == 1
    assert "ERROR: ref, installed: out of patience" in capsys.readouterr().out


def test_ctrl_c_keeps_the_samples_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    processes = Processes()

    def ask(options: Mapping[str, Any], variables: Mapping[str, str]) -> Mapping[str, Any]:
        if len(processes.seen) == 3:
            raise KeyboardInterrupt
        return processes(options, variables)

    out = tmp_path / "first.jsonl"
    monkeypatch.setattr(la_bench.first_call, "ask_process", ask)
    assert main(["first", "--backend", "ref", "--device", "cpu", "--samples", "5", "--out", str(out)]) == 130
    # The first of three processes does not count.
    assert len(json.loads(out.read_text())["first_ms"]) == 2
    assert "stopped by Ctrl-C" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--backend", "nonsense"], "backend 'nonsense' is not installed"),
        (["--backend", "ref", "--modes", "warm"], "--modes of ref can be installed; got 'warm'"),
        (["--backend", "cute"], "--backend cute runs cuda tensors, got cpu."),
    ],
    ids=["backend", "mode", "refused"],
)
def test_wrong_options(arguments: list[str], sentence: str, capsys: Capture) -> None:
    pytest.importorskip("la_cute")
    assert main(["first", "--device", "cpu", *arguments]) == 2
    written = capsys.readouterr()
    assert sentence in written.err
    assert written.out == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_cuda_without_a_gpu(capsys: Capture) -> None:
    assert main(["first", "--backend", "ref", "--device", "cuda"]) == 2
    assert "--device cuda needs a CUDA device" in capsys.readouterr().err
