"""The hot path: what is remembered between calls, and that it never speaks for another call."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from la_core import SpecViolation, decode
from la_core.backends.discover_backends import forget_backends
from la_core.conformance.decode_error_cases import (
    DECODE_ERROR_CASES,
    DECODE_OFFSET_ERROR_CASES,
    DecodeErrorCase,
    legal_arguments,
)
from la_core.ops import decode_plan, decode_values, facts_guard, kept_plans

Install = Callable[..., None]


@pytest.fixture
def in_python(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a torch whose guard is not sound: facts are compared in Python."""
    monkeypatch.setattr(facts_guard, "_probe", lambda: False)
    forget_backends()
    yield
    forget_backends()


def test_this_torch_has_a_sound_guard() -> None:
    """If this fails, calls are still right, but cost twice as much from Python: look at `facts_guard`."""
    assert facts_guard._probe()


def test_a_guard_that_misses_a_change_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts_guard, "_build", lambda tensors: lambda *now: True)
    assert not facts_guard._probe.__wrapped__()


def test_a_guard_that_is_gone_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(tensors: Any) -> None:
        raise ImportError("no TensorGuards")

    monkeypatch.setattr(facts_guard, "_build", gone)
    assert not facts_guard._probe.__wrapped__()


@pytest.mark.usefixtures("in_python")
@pytest.mark.parametrize("case", [*DECODE_ERROR_CASES, *DECODE_OFFSET_ERROR_CASES], ids=lambda case: case.id)
def test_wrong_calls_are_refused_without_the_guard(case: DecodeErrorCase) -> None:
    decode(**legal_arguments())
    arguments = legal_arguments()
    case.change(arguments)
    with pytest.raises(SpecViolation) as raised:
        decode(**arguments)
    assert str(raised.value) == case.sentence.format(device="cpu")


def test_the_same_facts_give_the_same_problem(install: Install) -> None:
    install("made")
    from la_core.backends.discover_backends import load_backend

    for mode in (torch.no_grad(), torch.inference_mode(), torch.enable_grad()):
        with mode:
            for _ in range(2):
                decode(**legal_arguments(), backend="made")
                arguments = legal_arguments()
                del arguments["out"]
                decode(**arguments, backend="made")
    problems = [problem for problem, _ in load_backend("made").calls]  # type: ignore[attr-defined]
    given, allocated = problems[0::2], problems[1::2]
    assert all(problem is given[0] for problem in given)
    assert all(problem is allocated[0] for problem in allocated)


def test_plans_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_plans, "MAX_PLANS", 4)
    forget_backends()
    for rows in range(1, 12):
        decode(*[torch.ones(rows, 1, 4)] * 3, torch.zeros(12, 4, 4), torch.arange(rows), torch.ones(1))
        assert len(decode_plan.store.plans) <= 4


def test_q_k_and_v_may_be_one_tensor() -> None:
    same = torch.randn(2, 2, 8)
    s, apart = torch.zeros(4, 8, 8), torch.zeros(4, 8, 8)
    offsets, decays = torch.tensor([1, 0]), torch.ones(2)
    for _ in range(2):
        out = decode(same, same, same, s, offsets, decays)
        expected = decode(same.clone(), same.clone(), same.clone(), apart, offsets, decays)
        assert torch.equal(out, expected)


def test_a_missing_out_is_contiguous_and_has_the_dtype_of_q() -> None:
    fused = torch.randn(3, 4, 5, 8).bfloat16()
    v = fused.permute(1, 2, 0, 3)[0]
    assert not v.is_contiguous()
    out = decode(v, v, v, torch.zeros(15, 8, 8), torch.arange(5), torch.ones(3))
    assert out.is_contiguous()
    assert out.dtype is torch.bfloat16
    assert out.shape == (5, 3, 8)


@pytest.mark.parametrize("scale", [1, 0.5, torch.float32.itemsize, float("nan")])
def test_any_real_number_is_a_scale(scale: float) -> None:
    q = torch.ones(1, 1, 4)
    out = decode(q, q, q, torch.zeros(1, 4, 4), torch.tensor([0]), torch.ones(1), softmax_scale=scale)
    assert torch.equal(out.isnan(), torch.full((1, 1, 4), scale != scale))


@pytest.mark.parametrize("name", ["q", "k", "v", "s", "decay_scales", "out"])
@pytest.mark.parametrize("given", [True, False])
def test_a_call_without_grad_does_not_speak_for_one_with(name: str, given: bool) -> None:
    """The same tensors, legal under no_grad, must be refused once grad mode is on, and be legal again afterwards."""
    arguments = legal_arguments()
    arguments[name].requires_grad_()
    if not given:
        del arguments["out"]
    if name not in arguments:
        return
    for _ in range(2):
        with torch.no_grad():
            decode(**arguments)
        with pytest.raises(SpecViolation, match=f"decode: {name} must not require grad"):
            decode(**arguments)


def test_tensors_made_in_inference_mode_work_outside_of_it() -> None:
    with torch.inference_mode():
        inside = legal_arguments()
    expected = decode(**legal_arguments())
    assert torch.equal(decode(**inside), expected)


def test_a_layout_that_interleaves_is_judged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """q in front of out in each row of one buffer: legal, and not worth judging exactly at every step."""
    judged = []
    real = decode_values.check_no_shared_memory
    monkeypatch.setattr(decode_values, "check_no_shared_memory", lambda *a: (judged.append(1), real(*a)))
    arguments = legal_arguments()
    for _ in range(3):
        fused = torch.zeros(2, 128 + 512, dtype=torch.bfloat16)
        arguments["q"], arguments["out"] = fused[:, :128].view(2, 2, 64), fused[:, 128:].view(2, 4, 128)
        for _ in range(3):
            decode(**arguments)
    assert 1 <= len(judged) <= 4
    arguments["q"] = fused[:, 8:136].view(2, 2, 64)
    with pytest.raises(SpecViolation, match="out is written and must not overlap q"):
        decode(**arguments)


def test_an_empty_batch_may_have_any_stride() -> None:
    q = torch.zeros(0, 2, 16)[:, :, ::2]
    out = decode(q, q, q, torch.zeros(0, 8, 8).expand(0, 8, 8), torch.zeros(0, dtype=torch.int32), torch.ones(2))
    assert out.shape == (0, 2, 8)


@pytest.mark.parametrize(("value", "expected"), [("", False), ("0", False), ("1", True)])
def test_la_check_offsets_is_read_once(value: str, expected: bool) -> None:
    code = "from la_core.ops.decode_values import ENV_CHECK_OFFSETS as on; import sys; sys.exit(3 if on else 4)"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "LA_CHECK_OFFSETS": value}, timeout=120, check=False
    )
    assert done.returncode == (3 if expected else 4)
