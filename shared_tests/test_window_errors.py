"""A wrong call of a window operator gives the same sentence on every backend, and writes nothing."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from la_core import KVWindow, SpecViolation
from la_core.conformance.compare import same_bits
from la_core.conformance.target import DeclaredRefusal
from la_core.conformance.window_error_cases import (
    OPERATORS,
    WINDOW_ERROR_CASES,
    WINDOW_VALUE_ERROR_CASES,
    Arguments,
    WindowErrorCase,
    call_window_operator,
    legal_window_arguments,
)
from la_core.conformance.window_target import WindowTarget
from la_core.spec.errors import UnsupportedByBackend


def _tensors(arguments: Arguments) -> dict[str, torch.Tensor]:
    """All tensors of a call whose bits can be read, those of the window by their names there."""
    found: dict[str, Any] = dict(arguments)
    if isinstance(found.get("window"), KVWindow):
        window = found.pop("window")
        found |= {f"window.{name}": getattr(window, name) for name in ("k", "v", "start", "length")}
    return {
        name: value
        for name, value in found.items()
        if isinstance(value, torch.Tensor) and value.layout is torch.strided and value.device.type != "meta"
    }


def _assert_refused(windows: WindowTarget, op: str, arguments: Arguments, sentence: str, **options: Any) -> None:
    """The sentence to the letter, and not a bit of any argument changed."""
    before = {name: value.detach().clone() for name, value in _tensors(arguments).items()}
    with pytest.raises(SpecViolation) as raised:
        call_window_operator(op, arguments, **{"backend": windows.target.name, **options})
    assert str(raised.value) == sentence.format(device=torch.zeros(1, device=windows.device).device)
    for name, value in _tensors(arguments).items():
        assert same_bits(value.detach().clone(), before[name]), f"{name} was written before the call was refused"


def _run(windows: WindowTarget, op: str, arguments: Arguments, **options: Any) -> Any:
    """The legal call, unless the backend declares that it does not run it."""
    try:
        return call_window_operator(op, arguments, backend=windows.target.name, **options)
    except UnsupportedByBackend as reason:
        raise DeclaredRefusal(str(reason)) from reason


@pytest.mark.parametrize("op", OPERATORS)
def test_the_call_that_the_cases_change_is_legal(windows: WindowTarget, op: str) -> None:
    """Also where values are checked on request."""
    _run(windows, op, legal_window_arguments(op, windows.device))
    _run(windows, op, legal_window_arguments(op, windows.device), check_offsets=True)


@pytest.mark.parametrize("case", WINDOW_ERROR_CASES, ids=lambda case: case.id)
def test_wrong_call(windows: WindowTarget, case: WindowErrorCase) -> None:
    arguments = legal_window_arguments(case.op, windows.device)
    case.change(arguments)
    _assert_refused(windows, case.op, arguments, case.sentence)


@pytest.mark.many
@pytest.mark.parametrize("case", WINDOW_ERROR_CASES, ids=lambda case: case.id)
def test_wrong_call_after_a_right_one(windows: WindowTarget, case: WindowErrorCase) -> None:
    """What the last call had found legal must not speak for this one."""
    with contextlib.suppress(DeclaredRefusal):
        _run(windows, case.op, legal_window_arguments(case.op, windows.device))
    arguments = legal_window_arguments(case.op, windows.device)
    case.change(arguments)
    _assert_refused(windows, case.op, arguments, case.sentence)


@pytest.mark.parametrize("case", WINDOW_VALUE_ERROR_CASES, ids=lambda case: case.id)
def test_wrong_values(windows: WindowTarget, case: WindowErrorCase) -> None:
    """A slot outside of the pool, or two rows of one, is named where values can be read: on a CPU, or on request."""
    arguments = legal_window_arguments(case.op, windows.device)
    case.change(arguments)
    options = {} if windows.device == "cpu" else {"check_offsets": True}
    _assert_refused(windows, case.op, arguments, case.sentence, **options)


@pytest.mark.parametrize("op", OPERATORS)
def test_repeated_negative_offsets_are_fine(windows: WindowTarget, op: str) -> None:
    arguments = legal_window_arguments(op, windows.device)
    arguments["s_offsets"].fill_(-1)
    before = {name: value.clone() for name, value in _tensors(arguments).items()}
    out = _run(windows, op, arguments, check_offsets=True)
    assert out is None or not bool(out.any())
    assert all(same_bits(before[name], value) for name, value in _tensors(arguments).items() if name != "out")


@pytest.mark.parametrize("op", OPERATORS[:1] + OPERATORS[4:])
def test_what_requires_grad_is_fine_without_grad_mode(windows: WindowTarget, op: str) -> None:
    arguments = legal_window_arguments(op, windows.device)
    arguments["decay_scales"].requires_grad_()
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            _run(windows, op, arguments)
