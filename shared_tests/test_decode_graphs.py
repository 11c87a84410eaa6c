"""Streams, CUDA graphs and devices. All of it needs a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from dataclasses import replace

import pytest
import torch

from la_core import SpecViolation, decode
from la_core.conformance.compare import same_bits
from la_core.conformance.decode_cases import NON_IDENTITY, PADDED
from la_core.conformance.decode_inputs import DecodeInputs, judge_decode
from la_core.conformance.target import Target

pytestmark = pytest.mark.needs_gpu


def _with_out(inputs: DecodeInputs) -> DecodeInputs:
    return replace(inputs, out=torch.full_like(inputs.v, torch.nan))


@pytest.fixture
def free_slots() -> list[tuple[int, ...]]:
    """Offsets that a captured batch takes in later replays: moved, padded, all padding."""
    return [(2, 0, 5, 1), (5, 1, -1, 0), (-1, -1, -1, -1), (3, 4, 2, -1), (1, 0, 3, 5)]


def test_a_graph_replays_after_offsets_and_inputs_are_edited(target: Target, free_slots: list[tuple[int, ...]]) -> None:
    inputs = _with_out(target.inputs(NON_IDENTITY))
    inputs.s.normal_(generator=torch.Generator(target.device).manual_seed(1))
    target.decode(inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        target.decode(inputs)
    for step, offsets in enumerate(free_slots):
        inputs.s_offsets.copy_(torch.tensor(offsets))
        for tensor in (inputs.q, inputs.k, inputs.v):
            tensor.normal_(generator=torch.Generator(target.device).manual_seed(step))

        def replay(replayed: DecodeInputs) -> torch.Tensor:
            graph.replay()
            torch.cuda.synchronize()
            assert replayed.out is not None
            return replayed.out

        assert judge_decode(inputs, replay) == []


def test_three_replays_are_three_steps(target: Target) -> None:
    inputs, eager = (_with_out(target.inputs(NON_IDENTITY)) for _ in range(2))
    target.decode(inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        target.decode(inputs)
    for _ in range(3):
        graph.replay()
    for _ in range(4):
        target.decode(eager)
    torch.cuda.synchronize()
    assert same_bits(inputs.s, eager.s)


FIRST_CALL = """
import sys, torch
from dataclasses import replace
from la_core.conformance.decode_cases import NON_IDENTITY
from la_core.conformance.decode_inputs import judge_decode
from la_core.conformance.target import Target
target = Target(sys.argv[1], "cuda")
inputs = target.inputs(NON_IDENTITY)
inputs = replace(inputs, out=torch.full_like(inputs.v, torch.nan))
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    target.decode(inputs)
def replay(inputs):
    graph.replay()
    torch.cuda.synchronize()
    return inputs.out
errors = judge_decode(inputs, replay)
sys.exit("; ".join(errors) or 0)
"""


def test_the_first_call_of_a_process_can_be_captured(target: Target) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FIRST_CALL, target.name], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr


def test_work_goes_to_the_current_stream(target: Target) -> None:
    """A side stream that is busy for a while: the call must wait for it, and the default stream must not have it."""
    inputs = _with_out(target.inputs(NON_IDENTITY))
    expected = _with_out(target.inputs(NON_IDENTITY))
    target.decode(expected)
    late = expected.q.clone()
    inputs.q.zero_()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        inputs.q.copy_(late)
        target.decode(inputs)
    side.synchronize()
    assert inputs.out is not None
    assert expected.out is not None
    assert same_bits(inputs.out, expected.out)
    assert same_bits(inputs.s, expected.s)


def test_no_call_waits_for_the_device(target: Target) -> None:
    inputs = _with_out(target.inputs(PADDED))
    target.decode(inputs)
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
            torch.cuda.set_sync_debug_mode("error")
        target.decode(inputs)
        decode(*inputs.tensors(), backend=target.name)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_offsets_can_be_checked_on_request_but_not_during_capture(target: Target) -> None:
    inputs = _with_out(target.inputs(NON_IDENTITY))
    decode(*inputs.tensors(), out=inputs.out, backend=target.name, check_offsets=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        target.decode(inputs)
        with pytest.raises(ValueError, match="check_offsets=True must read s_offsets back"):
            decode(*inputs.tensors(), out=inputs.out, backend=target.name, check_offsets=True)


def test_la_check_offsets_checks_by_default_but_not_during_capture(target: Target) -> None:
    code = (
        "import sys, torch\n"
        "from dataclasses import replace\n"
        "from la_core import SpecViolation\n"
        "from la_core.conformance.decode_cases import NON_IDENTITY\n"
        "from la_core.conformance.target import Target\n"
        "target = Target(sys.argv[1], 'cuda')\n"
        "inputs = target.inputs(NON_IDENTITY)\n"
        "inputs = replace(inputs, out=torch.zeros_like(inputs.v))\n"
        "target.decode(inputs)\n"
        "with torch.cuda.graph(torch.cuda.CUDAGraph()):\n"
        "    target.decode(inputs)\n"
        "inputs.s_offsets[0] = 99\n"
        "try:\n"
        "    target.decode(inputs)\n"
        "except SpecViolation as reason:\n"
        "    assert 'got slot 99 in row 0' in str(reason)\n"
        "else:\n"
        "    sys.exit('was not checked')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, target.name],
        env={**os.environ, "LA_CHECK_OFFSETS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["s_offsets", "decay_scales", "s"])
def test_an_argument_left_on_the_cpu_is_named(target: Target, name: str) -> None:
    inputs = target.inputs(NON_IDENTITY)
    left_behind = replace(inputs, **{name: getattr(inputs, name).cpu()})
    for _ in range(2):
        with pytest.raises(SpecViolation, match=f"decode: {name} must be on cuda:0, the device of q; got cpu"):
            target.decode(left_behind)
        target.decode(inputs)


@pytest.mark.parametrize("warm", [False, True])
def test_tensors_on_another_than_the_current_device(target: Target, warm: bool) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("not run: needs two CUDA devices")
    second = Target(target.name, "cuda:1")
    if warm:
        target.assert_conforms(NON_IDENTITY)
    second.assert_conforms(NON_IDENTITY)
    assert torch.cuda.current_device() == 0
    target.assert_conforms(NON_IDENTITY)
