"""A declared "no" to a window operator is really refused, a declared "yes" really runs."""

from __future__ import annotations

import inspect
import itertools
from dataclasses import replace

import pytest
import torch

import la_core
from la_core import UnsupportedByBackend
from la_core.backends.backend_contract import WindowBackend
from la_core.backends.choose_backend import refusal_of
from la_core.conformance.decode_cases import NON_IDENTITY
from la_core.conformance.target import DeclaredRefusal
from la_core.conformance.window_cases import ADVANCE, CLEAR, COMMIT, DECODE, FOLD, LAYERS, VERIFY, WindowCase
from la_core.conformance.window_inputs import make_window_inputs
from la_core.conformance.window_target import WindowTarget

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WINDOW_OPS = ("decode_window", "verify", "commit", "advance")
ALL_OPS = (DECODE, VERIFY, FOLD, COMMIT, LAYERS, ADVANCE, CLEAR)
every_op = pytest.mark.parametrize("base", ALL_OPS, ids=lambda case: "commit_layers" if case.L else case.op)


@pytest.mark.parametrize("op", WINDOW_OPS)
def test_signatures_are_those_of_the_contract(windows: WindowTarget, op: str) -> None:
    """Explicit parameters of the same names and order, of every operator that the backend states."""
    windows.needs(op)
    ours = inspect.signature(getattr(windows.target.backend, op)).parameters
    contract = list(inspect.signature(getattr(WindowBackend, op)).parameters)[1:]
    assert list(ours) == contract
    assert all(p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for p in ours.values())


@pytest.mark.parametrize("op", WINDOW_OPS)
def test_an_operator_is_stated_or_refused(windows: WindowTarget, op: str) -> None:
    """A backend need not have every operator; but one that it does not state must not run."""
    if op in windows.target.backend.capabilities.ops:
        windows.needs(op)
    else:
        with pytest.raises(DeclaredRefusal, match=f"does not implement {op}"):
            windows.needs(op)


def test_what_a_window_needs_comes_together(windows: WindowTarget) -> None:
    """A window can only be used with the operators that move its cursors and bring its tokens in."""
    ops = set(windows.target.backend.capabilities.ops)
    assert not ops & {"decode_window", "verify"} or {"advance", "commit"} <= ops


@pytest.mark.many
@pytest.mark.parametrize("k_size", [1, 8, 16, 48, 64, 96, 128, 256, 512])
@pytest.mark.parametrize("v_size", [1, 8, 48, 64, 128, 256])
def test_every_size_runs_or_is_refused(windows: WindowTarget, k_size: int, v_size: int) -> None:
    for base in (DECODE, VERIFY, COMMIT):
        windows.assert_conforms(replace(base, B=2, H=1, P=2, offsets=(1, 0), K=k_size, V=v_size, **_first_two(base)))


@pytest.mark.many
@pytest.mark.parametrize(("io", "state", "out"), list(itertools.product(DTYPES, repeat=3)), ids=str)
@pytest.mark.parametrize("window", [None, torch.float32], ids=str)
def test_declared_dtypes_are_what_runs(
    windows: WindowTarget, io: torch.dtype, state: torch.dtype, out: torch.dtype, window: torch.dtype | None
) -> None:
    declared = windows.target.backend.capabilities
    for base in (DECODE, VERIFY, COMMIT):
        sizes = windows.fit(replace(base, io_dtype=declared.io_dtypes[0], H=1))
        case = replace(sizes, io_dtype=io, state_dtype=state, out_dtype=out, window_dtype=window)
        op = "decode_window" if base is DECODE else base.op
        allowed = op in declared.ops and (window or io) in declared.window_dtypes and state in declared.state_dtypes
        if base is not COMMIT:
            allowed = allowed and io in declared.io_dtypes and out in declared.out_dtypes
        assert windows.refuses(case) == (not allowed)
        windows.assert_conforms(case)


@pytest.mark.parametrize("state_layout", ["vk", "kv"])
@pytest.mark.parametrize("state", DTYPES, ids=str)
def test_a_pool_that_decode_takes_is_taken_by_the_window_operators(
    windows: WindowTarget, state: torch.dtype, state_layout: str
) -> None:
    """Else no setting would run a model: one operator would want float32 states, and another bfloat16."""
    io = windows.target.backend.capabilities.io_dtypes[0]
    plain = windows.target.fit(replace(NON_IDENTITY, io_dtype=io, state_dtype=state, state_layout=state_layout))  # type: ignore[arg-type]
    for base in ALL_OPS[:-2]:
        op = {"decode": "decode_window", "verify": "verify"}.get(base.op, "commit")
        if op in windows.target.backend.capabilities.ops and not windows.target.refuses(plain):
            case = replace(base, K=plain.K, V=plain.V, io_dtype=io, state_dtype=state, state_layout=plain.state_layout)
            assert not windows.refuses(case)


@every_op
def test_refusal_is_pure(windows: WindowTarget, base: WindowCase) -> None:
    """The same sentence each time, and none that runs into the next."""
    for changes in ({}, {"K": 7}, {"V": 300}, {"io_dtype": torch.float16}, {"state_layout": "kv"}):
        problem = windows.problem(make_window_inputs(replace(base, **changes), windows.device))
        first = refusal_of(windows.target.backend, problem)
        assert first == refusal_of(windows.target.backend, replace(problem))
        assert first is None or (first.strip() == first and first and not first.endswith("."))


@every_op
def test_run_time_values_are_never_a_reason_to_refuse(windows: WindowTarget, base: WindowCase) -> None:
    problem = windows.problem(make_window_inputs(windows.fit(base), windows.device))
    answers = {
        refusal_of(windows.target.backend, replace(problem, B=rows, P=slots, T=tokens, L=layers))
        for rows, slots in ((1, 1), (3, 500), (70_000, 10**6))
        for tokens in ((1, 2, problem.N) if base.op == "verify" else (1,))
        for layers in ((1, 3, 80) if base.L else (1,))
    }
    assert len(answers) == 1


@pytest.mark.parametrize("N", [1, 2, 3, 16, 33, 64])
def test_every_size_of_a_window_runs_or_is_refused(windows: WindowTarget, N: int) -> None:
    for base in (DECODE, VERIFY, FOLD):
        case = replace(base, N=N, T=min(N, 2) if base.op == "verify" else 1, B=2, H=1, offsets=(3, 1))
        windows.assert_conforms(replace(case, starts=(N - 1, 0), lengths=(0, max(N - 2, 0))))


@every_op
def test_refused_calls_write_nothing(windows: WindowTarget, base: WindowCase) -> None:
    """If the backend has a limit at all, crossing it leaves every argument as it is."""
    for k_size in (1, 7, 48, 96):
        inputs = make_window_inputs(replace(base, K=k_size, H=1), windows.device)
        reason = windows.refusal(inputs)
        if reason is None:
            continue
        before = {name: buffer.clone() for name, buffer in inputs.buffers.items()}
        with pytest.raises(UnsupportedByBackend) as raised:
            windows.run(inputs)
        assert reason in str(raised.value)
        assert windows.target.name in str(raised.value)
        assert all(torch.equal(b.nan_to_num(7), inputs.buffers[n].nan_to_num(7)) for n, b in before.items())


def test_choice_can_explain_itself(windows: WindowTarget) -> None:
    windows.needs("verify")
    choice = la_core.explain_choice(windows.problem(windows.inputs(VERIFY)), backend=windows.target.name)
    assert choice.backend is windows.target.backend
    assert f"{windows.target.name}: ok" in str(choice)


def _first_two(base: WindowCase) -> dict[str, tuple[int, ...]]:
    """Cursors and counts of the first two rows."""
    values = {name: getattr(base, name) for name in ("starts", "lengths", "counts")}
    return {name: value[:2] for name, value in values.items() if isinstance(value, tuple)}
