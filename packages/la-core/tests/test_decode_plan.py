"""The hot path: what is remembered between calls, and that it never speaks for another call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from la_core import SpecViolation, decode
from la_core.conformance.decode_error_cases import (
    DECODE_ERROR_CASES,
    DECODE_OFFSET_ERROR_CASES,
    DecodeErrorCase,
    legal_arguments,
)
from la_core.ops import decode_plan, facts_guard

Install = Callable[..., None]


@pytest.fixture
def in_python(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a torch whose guard is not sound: facts are compared in Python."""
    monkeypatch.setattr(facts_guard, "_probe", lambda: False)
    decode_plan.forget_plans()
    yield
    decode_plan.forget_plans()


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
    monkeypatch.setattr(decode_plan, "MAX_PLANS", 4)
    decode_plan.forget_plans()
    for rows in range(1, 12):
        decode(*[torch.ones(rows, 1, 4)] * 3, torch.zeros(12, 4, 4), torch.arange(rows), torch.ones(1))
        assert len(decode_plan._plans) <= 4


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
