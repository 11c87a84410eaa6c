"""The window operators as la-core sees them: sentences, what is remembered between calls, what is never written."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import la_core
from la_core import KVWindow, SpecViolation, UnsupportedByBackend, WindowProblem, explain_choice
from la_core.backends.discover_backends import forget_backends, load_backend
from la_core.conformance.compare import same_bits
from la_core.conformance.window_error_cases import (
    OPERATORS,
    WINDOW_ERROR_CASES,
    WINDOW_VALUE_ERROR_CASES,
    WindowErrorCase,
    call_window_operator,
    legal_window_arguments,
)
from la_core.ops import facts_guard, window_plan
from la_core.ops.commit import CALLS
from la_core.spec import state_pool_rules

Install = Callable[..., None]

WINDOW_OPS = {
    "decode": "decode_window",
    "verify": "verify",
    "advance": "advance",
    "clear": "advance",
    "fold": "commit",
    "commit": "commit",
    "commit_layers": "commit",
}
"""Public function -> method of a backend."""

REMEMBERING = """
from la_core.backends.capabilities import Capabilities

class Remembering:
    name = "{name}"
    spec_revision = 1
    capabilities = Capabilities(
        ops=("decode", "decode_window", "verify", "commit", "advance"), device_types=("cpu",), k_sizes=(64,),
        sizes_text="K = 64",
    )
    calls = []

    def refusal(self, problem):
        return self.capabilities.window_refusal(problem)

    def decode(self, *arguments):
        self.calls.append(("decode", arguments))

    def decode_window(self, *arguments):
        self.calls.append(("decode_window", arguments))

    def verify(self, *arguments):
        self.calls.append(("verify", arguments))

    def commit(self, *arguments):
        self.calls.append(("commit", arguments))

    def advance(self, *arguments):
        self.calls.append(("advance", arguments))

backend = Remembering()
"""


def _tensors(arguments: dict[str, Any]) -> list[torch.Tensor]:
    tensors = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
    window = arguments["window"]
    return tensors + [t for t in window.tensors() if isinstance(t, torch.Tensor)] if _is_window(window) else tensors


def _is_window(value: object) -> bool:
    return isinstance(value, KVWindow)


@pytest.fixture(params=[True, False], ids=["guarded", "in-python"])
def guarded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """With torch's guard, and as on a torch whose guard is not sound."""
    if not request.param:
        monkeypatch.setattr(facts_guard, "_probe", lambda: False)
    forget_backends()
    yield request.param
    forget_backends()


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize("case", [*WINDOW_ERROR_CASES, *WINDOW_VALUE_ERROR_CASES], ids=lambda case: case.id)
def test_a_wrong_call_is_refused_before_and_after_a_legal_one(case: WindowErrorCase) -> None:
    for _ in range(2):
        arguments = legal_window_arguments(case.op)
        case.change(arguments)
        before = [t.clone() for t in _tensors(arguments) if t.device.type == "cpu"]
        with pytest.raises(SpecViolation) as raised:
            call_window_operator(case.op, arguments)
        assert str(raised.value) == case.sentence.format(device="cpu")
        after = [t for t in _tensors(arguments) if t.device.type == "cpu"]
        assert all(same_bits(now, then) for now, then in zip(after, before, strict=True))
        call_window_operator(case.op, legal_window_arguments(case.op))


@pytest.mark.parametrize("op", OPERATORS)
def test_the_same_facts_give_the_same_problem(op: str, install: Install) -> None:
    install("remembering", REMEMBERING)
    for mode in (torch.no_grad(), torch.inference_mode(), torch.enable_grad()):
        with mode:
            for _ in range(2):
                call_window_operator(op, legal_window_arguments(op), backend="remembering")
    calls = load_backend("remembering").calls  # type: ignore[attr-defined]
    assert [method for method, _ in calls] == [WINDOW_OPS[op]] * 6
    assert all(arguments[0] is calls[0][1][0] for _, arguments in calls)
    assert calls[0][1][0].op == WINDOW_OPS[op]


def test_what_differs_gives_another_problem(install: Install) -> None:
    install("remembering", REMEMBERING)
    arguments = legal_window_arguments("verify")
    for change in (
        {},
        {"draft_lengths": None},
        {"draft_lengths": arguments["draft_lengths"].long()},
        {"out": arguments["out"].float()},
        {"window": KVWindow.allocate(P=3, N=5, H=4, G=2, K=64, V=128)},
        {"s": arguments["s"].transpose(1, 2).contiguous().transpose(1, 2)},
    ):
        call_window_operator("verify", {**arguments, **change}, backend="remembering")
    with la_core.use_overlap():
        call_window_operator("verify", arguments, backend="remembering")
    problems = [call[0] for _, call in load_backend("remembering").calls]  # type: ignore[attr-defined]
    assert len(set(problems)) == 7
    assert [problem.overlap for problem in problems] == [False] * 6 + [True]
    assert problems[0].s_strides == (0, 128 * 64)
    assert problems[0].window_k_strides == (0, 4 * 2 * 64, 2 * 64, 64)


def test_a_stacked_problem_has_strides_of_layers(install: Install) -> None:
    install("remembering", REMEMBERING)
    call_window_operator("commit_layers", legal_window_arguments("commit_layers"), backend="remembering")
    ((_, (problem, *_rest)),) = load_backend("remembering").calls  # type: ignore[attr-defined]
    assert (problem.L, problem.s_strides[0], problem.window_v_strides[0]) == (2, 12 * 128 * 64, 3 * 4 * 4 * 128)


@pytest.mark.parametrize("op", OPERATORS)
def test_an_empty_batch_reaches_no_backend(op: str, install: Install) -> None:
    install("remembering", REMEMBERING)
    arguments = legal_window_arguments(op)
    for name in ("q", "k", "v", "out", "s_offsets", "draft_lengths", "accepted"):
        if name in arguments:
            arguments[name] = arguments[name][:0]
    result = call_window_operator(op, arguments, backend="remembering")
    assert result is arguments.get("out")
    assert load_backend("remembering").calls == []  # type: ignore[attr-defined]


@pytest.mark.parametrize("op", OPERATORS)
def test_a_backend_without_the_operator_is_not_asked(op: str, install: Install) -> None:
    install("made")
    with pytest.raises(UnsupportedByBackend) as raised:
        call_window_operator(op, legal_window_arguments(op), backend="made")
    reason = f"does not implement {WINDOW_OPS[op]}"
    assert str(raised.value).startswith(f"{op}: backend 'made' {reason}. The call is legal (")
    assert str(raised.value).endswith("choose another backend, or 'auto'.")


def test_auto_passes_over_a_backend_without_the_operator(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("made")
    install("remembering", REMEMBERING)
    monkeypatch.setattr("la_core.backends.choose_backend.PREFERENCE", {"cpu": ("made", "remembering", "ref")})
    call_window_operator("verify", legal_window_arguments("verify"))
    ((_, (problem, *_rest)),) = load_backend("remembering").calls  # type: ignore[attr-defined]
    choice = explain_choice(problem)
    assert choice.backend is load_backend("remembering")
    verdicts = dict(choice.verdicts)
    assert verdicts["made"] == "refused, does not implement verify"
    assert verdicts["remembering"] == "ok"
    other = explain_choice(dataclasses.replace(problem, K=32))
    assert dict(other.verdicts)["remembering"] == "refused, runs K = 64, got K = 32"


def test_a_backend_name_is_refused_in_the_name_of_the_operator() -> None:
    for op in OPERATORS:
        with pytest.raises(SpecViolation, match=f"{op}: backend must be a backend's name or 'auto'; got a int"):
            call_window_operator(op, legal_window_arguments(op), backend=3)


@pytest.mark.parametrize("op", ["decode", "verify"])
def test_a_missing_out_is_contiguous_and_has_the_dtype_of_q(op: str) -> None:
    arguments = legal_window_arguments(op)
    given = call_window_operator(op, arguments)
    arguments = legal_window_arguments(op)
    del arguments["out"]
    arguments["v"] = arguments["v"].repeat_interleave(2, -2)[..., ::2, :]
    out = call_window_operator(op, arguments)
    assert out.is_contiguous()
    assert same_bits(out, given)


def test_clear_repairs_cursors() -> None:
    arguments = legal_window_arguments("clear")
    window = arguments["window"]
    window.start.copy_(torch.tensor([-7, 1, 99]))
    window.length.copy_(torch.tensor([-3, 2, 77]))
    la_core.clear(**arguments)
    assert window.length.tolist() == [0, 2, 0]
    assert all(0 <= start < 4 for start in window.start[[0, 2]].tolist())


def test_an_allocated_window_is_empty_and_has_layers() -> None:
    window = KVWindow.allocate(P=3, N=4, H=4, G=2, K=8, V=16, layers=5)
    assert window.k.shape == (5, 3, 4, 2, 8)
    assert window.v.shape == (5, 3, 4, 4, 16)
    assert window.start.tolist() == window.length.tolist() == [0, 0, 0]
    layer = window.layer(2)
    assert layer.k.data_ptr() == window.k[2].data_ptr()
    assert layer.start is window.start
    assert KVWindow.allocate(P=3, N=4, H=4, K=8, V=16).k.shape == (3, 4, 4, 8)


def test_a_window_without_heads_of_k_is_refused() -> None:
    """0 heads are a mistake somewhere in the caller's sizes, and not a wish for as many as v has."""
    with pytest.raises(SpecViolation) as raised:
        KVWindow.allocate(P=3, N=4, H=4, G=0, K=8, V=16)
    assert str(raised.value) == "KVWindow.allocate: G must be at least 1 or None; got 0. Leave G out for G = H."


def test_interleaved_memory_is_judged_exactly() -> None:
    """k and v of a window as slices of one buffer, which is legal, until they share an element."""
    arguments = legal_window_arguments("decode")
    for overlap in (0, 1):
        fused = torch.zeros(3, 4, 2 * 64 + 4 * 128 - overlap, dtype=torch.bfloat16)
        window = dataclasses.replace(
            arguments["window"],
            k=fused[..., :128].unflatten(-1, (2, 64)),
            v=fused[..., 128 - overlap :].unflatten(-1, (4, 128)),
        )
        call = {**arguments, "window": window}
        for _ in range(2):
            if overlap:
                with pytest.raises(SpecViolation, match=r"decode: window.k is written and must not overlap window.v"):
                    call_window_operator("decode", call)
            else:
                call_window_operator("decode", call)


@pytest.mark.parametrize("op", ["decode", "verify"])
def test_k_and_v_in_one_buffer_are_judged_once(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ever new q, k, v and batches, and windows of other layers, tell nothing new of how k and v of a window lie."""
    judged: list[int] = []
    real = state_pool_rules._byte_runs
    monkeypatch.setattr(state_pool_rules, "_byte_runs", lambda *layout: (judged.append(1), real(*layout))[1])
    state_pool_rules._layouts_meet.cache_clear()
    forget_backends()
    arguments, alive = legal_window_arguments(op), []
    layers = torch.zeros(2, 3, 4, 2 * 64 + 4 * 128 + 1, dtype=torch.bfloat16)

    def call(step: int, v_from: int) -> None:
        layer, rows = layers[step % 2], 1 + step // 4
        k, v = layer[..., :128].unflatten(-1, (2, 64)), layer[..., v_from : v_from + 512].unflatten(-1, (4, 128))
        names = {"q", "k", "v", "out", "s_offsets", "draft_lengths"} & set(arguments)
        alive.append({name: arguments[name][:rows].clone() for name in names})
        window = dataclasses.replace(arguments["window"], k=k, v=v)
        call_window_operator(op, {**arguments, **alive[-1], "window": window})

    for step in range(6):
        call(step, 129)
    assert len(judged) == 2, "the k and the v of one window"
    for step in (5, 5):
        with pytest.raises(SpecViolation, match=f"{op}: window.k is written and must not overlap window.v"):
            call(step, 127)


@pytest.mark.parametrize("op", OPERATORS)
def test_a_broken_preferred_backend_is_loud_where_the_call_stands(
    op: str, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The warning names the operator, and the caller's line and not one of la-core."""
    install("preferred", "raise RuntimeError('no driver')\n")
    monkeypatch.setattr("la_core.backends.choose_backend.PREFERENCE", {"cpu": ("preferred", "ref")})
    arguments = legal_window_arguments(op)
    with pytest.warns(RuntimeWarning, match=f"{op} runs on 'ref': unusable, backend 'preferred'") as warned:
        getattr(la_core, op)(**arguments)
    assert [warning.filename for warning in warned] == [__file__]


def test_what_is_remembered_of_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ever new addresses, of which only those that interleave are judged exactly, and those once."""
    monkeypatch.setattr(window_plan, "MAX_ADDRESSES", 4)
    judged: list[str] = []
    real = window_plan.check_no_shared_memory
    monkeypatch.setattr(window_plan, "check_no_shared_memory", lambda op, *rest: (judged.append(op), real(op, *rest)))
    forget_backends()
    arguments = legal_window_arguments("fold")
    alive = []
    for _ in range(12):
        alive.append(arguments["decay_scales"].clone())
        for _ in range(2):
            call_window_operator("fold", {**arguments, "decay_scales": alive[-1]})
    plan = CALLS["fold"].one.latest
    assert plan is not None
    assert len(plan.apart) <= 4
    assert judged == ["fold"], "the first call, whose facts were new"
    buffer = torch.zeros(12 * 128 * 64 + 8)
    inside = {**arguments, "s": buffer[4:-4].view(12, 128, 64), "decay_scales": buffer[:4]}
    for _ in range(3):
        call_window_operator("fold", inside)
    assert judged == ["fold"], "ranges that only touch need no exact answer"
    interleaved = torch.zeros(12, 128 * 64 + 4)
    apart = {"s": interleaved[:, :-4].view(12, 128, 64), "decay_scales": interleaved[5, -4:]}
    call_window_operator("fold", {**arguments, **apart})
    assert len(judged) > 1
    judged.clear()
    for _ in range(2):
        call_window_operator("fold", {**arguments, **apart})
    assert judged == []


@pytest.mark.parametrize("op", ["decode", "verify", "fold", "commit", "advance"])
def test_values_of_slots_that_no_row_names_are_not_judged(op: str) -> None:
    """Padding rows have no slot: whatever slot 0 holds is none of the call's business, until a row names it."""
    arguments = legal_window_arguments(op)
    arguments["window"].start[0], arguments["window"].length[0] = -7, 99
    arguments["s_offsets"].copy_(torch.tensor([-1, 2]))
    call_window_operator(op, arguments)
    arguments["s_offsets"].copy_(torch.tensor([0, -1]))
    for _ in range(2):
        with pytest.raises(SpecViolation, match=f"{op}: window.start must be from 0 to N - 1 = 3; got -7 in slot 0"):
            call_window_operator(op, arguments)


def test_a_problem_can_be_made_of_tensors(install: Install) -> None:
    """The same as that of the call, in which a number for all rows leaves no trace."""
    install("remembering", REMEMBERING)
    for op in OPERATORS:
        arguments = legal_window_arguments(op)
        changes: list[dict[str, Any]] = [{}, *({name: None} for name in ("out", "draft_lengths") if name in arguments)]
        changes += [{"accepted": 2}] if "accepted" in arguments else []
        for change in changes:
            call = {**arguments, **change}
            call_window_operator(op, call, backend="remembering")
            problem = la_core.window_problem(op, **call)
            _, (seen, *_rest) = load_backend("remembering").calls[-1]  # type: ignore[attr-defined]
            assert problem == seen, op


@pytest.mark.parametrize("case", WINDOW_ERROR_CASES, ids=lambda case: case.id)
def test_tensors_of_a_wrong_call_make_no_problem(case: WindowErrorCase) -> None:
    """One voice: the sentence of the call, unless what is wrong is an option or where the tensors lie."""
    arguments = legal_window_arguments(case.op)
    case.change(arguments)
    options = {"room", "softmax_scale", "check_offsets"} & set(arguments)
    sentence = case.sentence.format(device="cpu")
    if options or "must not overlap" in sentence or case.id.endswith("accepted-is-None"):
        for name in options:
            del arguments[name]
        assert la_core.window_problem(case.op, **arguments).op == WINDOW_OPS[case.op]
        return
    with pytest.raises(SpecViolation) as raised:
        la_core.window_problem(case.op, **arguments)
    assert str(raised.value) == sentence


def test_a_problem_of_no_operator_or_of_another_ones_arguments_is_refused() -> None:
    arguments = legal_window_arguments("fold")
    with pytest.raises(SpecViolation) as raised:
        la_core.window_problem("prefill", **arguments)
    assert str(raised.value) == (
        "window_problem: op must be the name of an operator with a window; got 'prefill'. "
        "Pass one of decode, verify, fold, commit, commit_layers, advance, clear."
    )
    with pytest.raises(SpecViolation) as raised:
        la_core.window_problem("fold", **arguments, accepted=1)
    assert str(raised.value) == "fold: accepted must be left out; got a int. fold takes no such thing."
    with pytest.raises(SpecViolation) as raised:
        la_core.window_problem("verify", **arguments)
    assert str(raised.value) == "verify: q must be a torch.Tensor [B, T, G, K]; got None. Pass a tensor."


@pytest.mark.parametrize("op", OPERATORS)
def test_a_contiguous_problem_is_that_of_fresh_tensors(op: str) -> None:
    arguments = legal_window_arguments(op)
    drafts = 3 if op == "verify" else 1
    sizes = {"B": 2, "P": 3, "N": 4, "H": 4, "G": 2, "K": 64, "V": 128, "T": drafts}
    counts = None if op in ("decode", "fold", "clear") else torch.int32
    layers = 2 if op == "commit_layers" else 1
    problem = WindowProblem.contiguous(WINDOW_OPS[op], **sizes, L=layers, counts_dtype=counts)  # type: ignore[arg-type]
    assert problem == la_core.window_problem(op, **arguments)


def test_the_fewest_bytes_of_a_call() -> None:
    """Counted by hand: a state has 128 x 64 numbers of 4 bytes, k of a token 2 x 64 and v 4 x 128 of 2 bytes."""
    states, k, v = 2 * 4 * 128 * 64 * 4, 2 * 64 * 2, 4 * 128 * 2
    problem = {op: la_core.window_problem(op, **legal_window_arguments(op)) for op in OPERATORS}
    assert [problem[op].state_bytes for op in ("decode", "commit_layers", "advance")] == [states, 2 * states, 0]
    # 2 rows with an offset and two cursors, 4 slopes; verify, commit and advance have counts, too.
    rows, slopes, counts = 2 * (4 + 8), 4 * 4, 2 * 4
    new_tokens = 2 * (2 * k + 2 * v)
    assert problem["decode"].bytes_moved() == states + 2 * (k + v) + new_tokens + rows + slopes
    assert (
        problem["decode"].bytes_moved(pending=4, writing=1) == 2 * states + 2 * 4 * (k + v) + new_tokens + rows + slopes
    )
    assert problem["decode"].bytes_moved(pending=2.5, writing=0.25) == (
        1.25 * states + 2 * (2.5 + 0.75) * (k + v) + new_tokens + rows + slopes
    )
    assert problem["verify"].bytes_moved(pending=2, writing=0.5) == (
        states + 2 * (2 + 3) * (k + v) + 3 * new_tokens + rows + slopes + counts
    )
    assert problem["fold"].bytes_moved(pending=1.5, writing=0.5) == states + 2 * 1.5 * (k + v) + rows + slopes
    assert problem["fold"].bytes_moved() == rows + slopes
    assert problem["commit"].bytes_moved(pending=3, writing=1) == 2 * states + 2 * 3 * (k + v) + rows + slopes + counts
    assert problem["commit_layers"].bytes_moved(pending=3, writing=1) == (
        2 * (2 * states + 2 * 3 * (k + v) + slopes) + rows + counts
    )
    assert problem["advance"].bytes_moved() == rows + counts
