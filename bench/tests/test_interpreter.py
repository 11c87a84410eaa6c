"""Judging a backend for GPUs on a CPU, in a process where its interpreter is on."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import la_bench.interpreter
import la_bench.tensors
import la_bench.timing
from la_bench.cli import main
from la_bench.interpreter import INTERPRETERS, InterpretedVariant, Interpreter
from la_bench.report_content import judged_only
from la_bench.rows import Accuracy, Row, from_json_lines, to_json_lines
from la_bench.run_compare import WorkloadSubject
from la_bench.tensors import DecodeCall
from la_bench.variants import BackendVariant, backend_variants
from la_bench.workloads import make_workload
from la_core import UnsupportedByBackend, decode

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="la-triton is for Linux")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def variant() -> Iterator[InterpretedVariant]:
    one = InterpretedVariant("triton")
    yield one
    one.close()


def make_call(H: int = 2, B: int = 3) -> DecodeCall:
    """q, k, v as slices of one buffer, and a pool with a gap after each row."""
    generator = torch.Generator().manual_seed(0)
    fused = torch.randn(B, 3, H, 128, generator=generator, dtype=torch.bfloat16)
    pool = torch.randn(4 * H, 129, 128, generator=generator)[:, :128]
    return DecodeCall(
        *(fused[:, n] for n in range(3)),
        pool,
        torch.tensor([2, -1, 0], dtype=torch.int32)[:B],
        torch.tensor([0.5, 0.1])[:H],
        torch.full((B, H, 128), torch.nan, dtype=torch.bfloat16),
    )


def test_the_call_is_made_in_the_callers_memory(variant: InterpretedVariant) -> None:
    here, there = make_call(), make_call()
    decode(here.q, here.k, here.v, here.s, here.s_offsets, here.decay_scales, out=here.out, backend="ref")
    gaps = there.s._base[:, 128].clone()  # type: ignore[index]
    before = there.s.clone()
    out = variant.run(there)
    assert out.data_ptr() == there.out.data_ptr()
    torch.testing.assert_close(there.s, here.s)
    torch.testing.assert_close(there.out, here.out)
    assert not torch.equal(there.s, before)
    assert torch.equal(there.s._base[:, 128], gaps)  # type: ignore[index]


def test_the_gate_judges_it_and_finds_what_is_wrong(
    variant: InterpretedVariant, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = WorkloadSubject(make_workload("ling-2.6-flash-tp4/light", "cpu", 0), CPU, 0)
    subject.start_judging()
    verdict = subject.judge(variant)
    assert verdict.faults == ()
    assert 0 < verdict.state_error < 1e-6
    whole = la_bench.interpreter._receive

    def bent(source: io.BytesIO) -> object:
        reply = whole(source)
        reply["s"][-1, -1, -1] = 0
        return reply

    # As a backend does that writes to a slot of nobody: its NaN is gone.
    monkeypatch.setattr(la_bench.interpreter, "_receive", bent)
    assert subject.judge(variant).faults


def test_a_refusal_and_an_exception_come_back_as_such(variant: InterpretedVariant) -> None:
    call = make_call()
    wide = DecodeCall(
        *(torch.randn(1, 1, 512) for _ in range(3)),
        torch.zeros(1, 512, 512),
        torch.zeros(1, dtype=torch.int32),
        torch.ones(1),
        torch.empty(1, 1, 512),
    )
    with pytest.raises(UnsupportedByBackend, match="triton"):
        variant.run(wide)
    call.s_offsets[:] = 99
    with pytest.raises(RuntimeError, match="SpecViolation: decode: s_offsets"):
        variant.run(call)
    # The process is still there.
    variant.run(make_call())


def test_a_process_that_dies_is_an_error_and_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(INTERPRETERS, "never-heard-of", ("no interpreter", {"PYTHONHOME": "/nowhere"}))
    interpreter = Interpreter("never-heard-of")
    with pytest.raises(RuntimeError, match="the process that interprets never-heard-of ended, with status 1"):
        interpreter.run(make_call())


WAITING = """
import signal
import time
import torch
from la_bench.interpreter import Interpreter
from la_bench.tensors import DecodeCall

# Not so where the tests run in the background of a shell.
signal.signal(signal.SIGINT, signal.default_int_handler)
tokens = [torch.zeros(1, 1, 16) for _ in range(4)]
offsets = torch.zeros(1, dtype=torch.int32)
interpreter = Interpreter("triton")
interpreter.run(DecodeCall(*tokens[:3], torch.zeros(1, 16, 16), offsets, torch.ones(1), tokens[3]))
try:
    print("ready", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    interpreter.close()
    print("closed")
"""


def test_ctrl_c_in_a_terminal_is_not_the_other_process_to_answer() -> None:
    command = [sys.executable, "-c", WAITING]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        # A terminal sends it to all processes of the group.
        os.killpg(program.pid, signal.SIGINT)
        assert program.communicate(timeout=60) == ("closed\n", "")


@pytest.mark.parametrize("kept", [4, 9, 100])
def test_a_message_that_was_cut_off_is_the_end(kept: int) -> None:
    whole = io.BytesIO()
    la_bench.interpreter._send(whole, torch.ones(3))
    whole.seek(0)
    assert torch.equal(la_bench.interpreter._receive(whole), torch.ones(3))
    assert la_bench.interpreter._receive(io.BytesIO(whole.getvalue()[:kept])) is None


def test_only_loaded_backends_without_a_gpu_are_interpreted() -> None:
    kinds = {one.name: type(one) for one in backend_variants(("ref", "triton", "never-heard-of"), None)}
    assert kinds == {"ref": BackendVariant, "triton": InterpretedVariant, "never-heard-of": BackendVariant}
    assert type(backend_variants(("triton",), (9, 0))[0]) is BackendVariant


def test_a_report_says_that_it_was_judged_and_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(la_bench.tensors.ARENA_BYTES, "cpu", 48 << 20)
    monkeypatch.setitem(la_bench.timing.COPY_BYTES, "cpu", 8 << 20)
    workloads = "ling-2.6-flash-tp4/light,ling-2.6-flash-tp4/heavy"
    options = ["--quick", "--device", "cpu", "--backends", "triton", "--workloads", workloads]
    assert main(["compare", *options, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "right, not timed" in printed
    rows = from_json_lines((tmp_path / "rows.jsonl").read_text())
    light, heavy = (row for row in rows if row.backend.name == "triton")
    assert (light.status, light.result) == ("checked", None)
    assert light.accuracy is not None
    assert light.accuracy.state_error < 1e-6
    assert heavy.status == "refused"
    assert "with at most 256 states in a call, got 576" in str(heavy.reason)
    report = (tmp_path / "report.md").read_text()
    assert (
        "triton is right on ling-2.6-flash-tp4/light. It was judged under Triton's interpreter, whose time says "
        "nothing: not timed."
    ) in report
    assert "| triton | right, not timed | - | - |" in report


def announced(
    arguments: list[str], out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> int:
    """The seconds that the program says a grid on a CPU will take."""

    def stop(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("la_bench.compare_command.run_grid", stop)
    assert main(["compare", "--device", "cpu", "--out", str(out), *arguments]) == 130
    found = re.search(r", about (\d+) s\.", capsys.readouterr().out)
    assert found is not None
    return int(found[1])


def test_an_interpreter_counts_in_the_time_that_is_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_it, without_it, more = (
        announced(["--grid", grid, "--backends", backends], tmp_path, monkeypatch, capsys)
        for grid, backends in (("8x1,4", "ref,triton"), ("8x1,4", "ref"), ("8x1,4,8,16", "ref,triton"))
    )
    # 5 s on two idle cores, and 14 s where other programs use them as well.
    assert 5 <= with_it <= 14
    assert without_it <= with_it - 4
    assert more >= with_it + 2


def test_rows_keep_the_accuracy(make_row: Callable[..., Row]) -> None:
    row = replace(make_row(status="checked", reason="judged"), accuracy=Accuracy(1e-3, 1e-8))
    assert from_json_lines(to_json_lines([row])) == [row]
    assert len(judged_only([row])) == 1
