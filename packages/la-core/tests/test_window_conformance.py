"""The judge of the window operators: its truth by hand, its tolerances at their edges, its verdicts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from la_core.conformance.tolerances import window_out_tolerance, window_state_tolerance
from la_core.conformance.window_cases import (
    ADVANCE,
    CLEAR,
    COMMIT,
    DECODE,
    FOLD,
    LAYERS,
    RAGGED,
    REFERENCE_CASES,
    SAMPLE_CASES,
    VERIFY,
    WindowCase,
)
from la_core.conformance.window_inputs import WindowInputs, make_window_inputs
from la_core.conformance.window_judge import judge_window
from la_core.conformance.window_truth import (
    TrueValue,
    advance_truth,
    clear_truth,
    commit_truth,
    decode_window_truth,
    value_of_slot,
    verify_truth,
)
from la_core.spec.kv_window import KVWindow

HALF = torch.tensor([math.log(2.0)])
"""A slope that halves, as exactly as float32 says it."""
NAN = math.nan


def _window(k: list[float], v: list[float], start: int, length: int) -> KVWindow:
    """One slot, one head, K = V = 1."""
    numbers = (torch.tensor(values).view(1, -1, 1, 1) for values in (k, v))
    return KVWindow(*numbers, torch.tensor([start], dtype=torch.int32), torch.tensor([length], dtype=torch.int32))


def _one(value: float) -> torch.Tensor:
    return torch.full((1, 1, 1), value)


SLOT_0 = torch.tensor([0])


def _near(value: torch.Tensor, expected: float) -> bool:
    """Within what the float32 slope is off."""
    return value.item() == pytest.approx(expected, rel=1e-6)


def test_value_of_a_slot_by_hand() -> None:
    """S = 16, then tokens worth 3 * 2, 5 * 1, and halving at each: (16/2 + 6)/2 + 5 = 12. The ring wraps: 2, then 0."""
    window = _window([1, NAN, 2], [5, NAN, 3], start=2, length=2)
    true = value_of_slot(window, _one(16), 0, HALF)
    assert _near(true.value, 12)
    assert _near(true.magnitude, 12)
    assert _near(true.aged, 16 / 4 * 2 + 6 / 2)
    assert true.tokens == 2


def test_magnitude_does_not_cancel() -> None:
    window = _window([1, -1], [1, 1], start=0, length=2)
    true = value_of_slot(window, _one(-2), 0, torch.zeros(1))
    assert (true.value.item(), true.magnitude.item(), true.aged.item()) == (-2, 4, 5)
    out = true.output(torch.tensor([[-3.0]]), 0.5)
    assert (out.value.item(), out.magnitude.item(), out.aged.item()) == (3, 6, 7.5)


def test_decode_with_a_window_by_hand() -> None:
    """(16/2 + 6)/2 + 1 * 4 = 11 is read by q = 10 and scale 2; the token goes behind the pending one."""
    tokens = (torch.full((1, 1, 1), 10.0), _one(1), _one(4), _one(16), SLOT_0, HALF)
    truth = decode_window_truth(*tokens, _window([NAN, NAN, 2], [NAN, NAN, 3], 2, 1), 2.0)
    assert _near(truth.outputs[0, 0].value, 220)
    assert truth.states == {}
    assert {key: (k.item(), v.item()) for key, (k, v) in truth.places.items()} == {(0, 0): (1, 4)}
    full = decode_window_truth(*tokens, _window([2], [3], 0, 1), 2.0)
    assert _near(full.outputs[0, 0].value, 220)
    assert _near(full.states[0, 0].value, 11)
    assert full.places == {}


def test_verify_by_hand() -> None:
    """Two of three drafts count: 16/2 + 3 * 1 = 11, then 11/2 + 1 * 2 = 7.5; nothing is read or zeroed behind."""
    q = torch.tensor([1.0, 2.0, NAN]).view(1, 3, 1, 1)
    k = torch.tensor([1.0, 2.0, NAN]).view(1, 3, 1, 1)
    v = torch.tensor([3.0, 1.0, NAN]).view(1, 3, 1, 1)
    window = _window([NAN, NAN, NAN], [NAN, NAN, NAN], 1, 0)
    truth = verify_truth(q, k, v, _one(16), SLOT_0, HALF, window, torch.tensor([2]))
    assert set(truth.outputs) == {(0, 0), (0, 1)}
    assert _near(truth.outputs[0, 0].value, 11)
    assert _near(truth.outputs[0, 1].value, 15)
    assert list(truth.places) == [(0, 1), (0, 2)]
    assert truth.states == {}
    none = verify_truth(q, k, v, _one(16), SLOT_0, HALF, replace(window, length=torch.tensor([2])), torch.tensor([2]))
    assert (none.outputs, none.places, none.no_room) == ({}, {}, {0})


def test_commit_by_hand() -> None:
    window = _window([2, 7, 1], [1, 7, 3], start=2, length=1)
    assert _near(commit_truth(window, _one(16), SLOT_0, HALF, 1).states[0, 0].value, 7.5)
    assert _near(commit_truth(window, _one(16), SLOT_0, HALF).states[0, 0].value, 11)
    assert commit_truth(window, _one(16), SLOT_0, HALF, room=2).states == {}
    assert set(commit_truth(window, _one(16), SLOT_0, HALF, room=3).states) == {(0, 0)}
    empty = replace(window, length=torch.tensor([0]))
    assert commit_truth(empty, _one(16), SLOT_0, HALF).states == {}
    assert commit_truth(window, _one(16), torch.tensor([-1]), HALF, 1).states == {}


def test_cursors_by_hand() -> None:
    cursors = [torch.tensor(values, dtype=torch.int32) for values in ([0, 3, 2, 1], [0, 2, 4, 3])]
    window = KVWindow(torch.zeros(4, 4, 1, 1), torch.zeros(4, 4, 1, 1), *cursors)
    everyone = torch.tensor([3, -1, 1, 2, 0])
    truth = advance_truth(window, everyone, torch.tensor([1, 9, 2, 1, 3]))
    assert (truth.start.tolist(), truth.length.tolist()) == ([0, 3, 2, 1], [3, 4, 0, 4])
    assert advance_truth(window, torch.tensor([1])).length.tolist() == [0, 3, 4, 3]
    truth = clear_truth(window, everyone)
    assert (truth.start.tolist(), truth.length.tolist()) == ([0, 1, 2, 0], [0, 0, 0, 0])
    truth = clear_truth(window, everyone, room=2)
    assert (truth.start.tolist(), truth.length.tolist()) == ([0, 3, 2, 0], [0, 2, 0, 0])


def test_truth_equals_exact_fractions() -> None:
    """The closed form of the value, in pure Python with a decay of 1, grouped heads and a wrapped ring."""
    P, N, G, H, K, V = 2, 3, 2, 4, 2, 3
    numbers = iter(range(1, 10_000))
    take = lambda *shape: torch.tensor(  # noqa: E731
        [((next(numbers) * 7) % 11 - 5) / 4 for _ in range(torch.Size(shape).numel())]
    ).view(shape)
    cursors = (torch.tensor(n, dtype=torch.int32) for n in ([0, 2], [3, 2]))
    window = KVWindow(take(P, N, G, K), take(P, N, H, V), *cursors)
    s = take(P * H, V, K)
    true = value_of_slot(window, s, 1, torch.zeros(H))
    for h in range(H):
        for i in range(V):
            for j in range(K):
                exact = Fraction(s[H + h, i, j].item())
                for place in (2, 0):
                    v, k = window.v[1, place, h, i].item(), window.k[1, place, h // 2, j].item()
                    exact += Fraction(v) * Fraction(k)
                assert Fraction(true.value[h, i, j].item()) == exact


def test_tolerances_at_the_sizes_people_use() -> None:
    """What the table promises: 5e-6 for a float32 output over 32 tokens; no more than decode's for a single one."""
    slopes = torch.tensor([0.02, 1.0])
    one = torch.ones(2, dtype=torch.float64)
    out = window_out_tolerance(torch.float32, 128, slopes, 32).allowed(one, one, one, 128)
    assert bool((out < 5e-6).all())
    state = window_state_tolerance(torch.float32, slopes, 1).allowed(one, one, one, 128)
    assert bool((state < 1e-6).all())
    more = window_state_tolerance(torch.float32, slopes, 1, stores=7)
    assert more.arithmetic > window_state_tolerance(torch.float32, slopes, 1).arithmetic
    assert bool(torch.isfinite(window_out_tolerance(torch.float32, 1, torch.tensor([1e30]), 1).aging).all())


def test_case_ids_are_unique() -> None:
    ids = [case.id for case in dict.fromkeys([*SAMPLE_CASES, *REFERENCE_CASES])]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("case", REFERENCE_CASES, ids=lambda case: case.id)
def test_everything_that_counts_is_finite_and_the_rest_is_poisoned(case: WindowCase) -> None:
    inputs = make_window_inputs(case)
    truth = inputs.truth()
    for true in (*truth.outputs.values(), *truth.states.values()):
        assert bool(torch.isfinite(true.value).all())
    for slot in set(range(case.P)) - set(inputs.s_offsets.tolist()):
        assert bool(inputs.window.k[..., slot, :, :, :].isnan().all())
        assert bool(inputs.s[..., slot * case.H : (slot + 1) * case.H, :, :].isnan().all())


def _right(inputs: WindowInputs) -> torch.Tensor | None:
    """Do what the truth says."""
    truth, case, window = inputs.truth(), inputs.case, inputs.window
    for (slot, place), (k, v) in truth.places.items():
        window.k[slot, place], window.v[slot, place] = k, v
    for (layer, slot), true in truth.states.items():
        pool = inputs.s[layer] if case.L else inputs.s
        pool[slot * case.H : (slot + 1) * case.H] = true.value.to(pool.dtype)
    window.start.copy_(truth.start)
    window.length.copy_(truth.length)
    if case.op not in ("decode", "verify"):
        return None
    out = inputs.out if inputs.out is not None else torch.empty_like(inputs.v)
    out.zero_()
    tokens = out if case.op == "verify" else out[:, None]
    for b in truth.no_room:
        tokens[b, : case.T if inputs.counts is None else int(inputs.counts[b])] = NAN
    for (b, t), true in truth.outputs.items():
        tokens[b, t] = true.value.to(out.dtype)
    return out


@pytest.mark.parametrize("case", SAMPLE_CASES, ids=lambda case: case.id)
def test_the_truth_itself_is_judged_right(case: WindowCase) -> None:
    assert judge_window(make_window_inputs(case), _right) == []


GAPS = {"pool_gap": 3, "window_gap": 2, "out_gap": 2}
SPOILED: list[tuple[WindowCase, Callable[[WindowInputs], object], str]] = [
    (DECODE, lambda i: i.out[0, 1].mul_(1.02), "out of 1 of 8 (row, head) is off; worst in row 0, token 0, head 1"),
    (DECODE, lambda i: i.s[0].fill_(0), "the pool outside of the states to write must not change"),
    (DECODE, lambda i: i.s[2].copy_(i.s[2].bfloat16()), "state of 1 of 2 (row, head) is off; worst in slot 1, head 0"),
    (DECODE, lambda i: i.window.k[2, 3].zero_(), "the window must hold the new tokens' k and v at place 3 of slot 2"),
    (DECODE, lambda i: i.window.v[1].zero_(), "the window's v outside of the new tokens' places must not change"),
    (DECODE, lambda i: i.window.k[4, 0, 0, 0].zero_(), "the window's k outside of the new tokens' places"),
    (DECODE, lambda i: i.window.length[2].add_(1), "window.length must be ["),
    (DECODE, lambda i: i.buffers["out"][256].fill_(0), "the gaps of out must not change"),
    (DECODE, lambda i: i.q[0, 0, 0].fill_(9), "q must not change"),
    (RAGGED, lambda i: i.out[1, 1].fill_(NAN), "out of row 1, token 1 must be zero"),
    (RAGGED, lambda i: i.out[1, 0, 1, 5].fill_(NAN), "worst in row 1, token 0, head 1"),
    (RAGGED, lambda i: i.s[4].add_(1), "the pool outside of the states to write must not change"),
    (RAGGED, lambda i: i.counts[0].add_(1), "counts must not change"),
    (replace(VERIFY, lengths=(5, 4, 8, 3)), lambda i: i.out[2, 3].zero_(), "must be NaN, as the window has no room"),
    (FOLD, lambda i: i.s[4:6].copy_(0.9 * i.s[4:6]), "the pool outside of the states to write must not change"),
    (COMMIT, lambda i: i.window.k[2].nan_to_num_(), "the window's k outside of the new tokens' places must not"),
    (LAYERS, lambda i: i.s[2, 0].mul_(1.01), "state of 1 of 24 (row, head) is off; worst in slot 0 of layer 2, head 0"),
    (ADVANCE, lambda i: i.window.start[5].sub_(1), "window.start must be ["),
    (CLEAR, lambda i: i.window.length[1].add_(1), "window.length must be ["),
]  # fmt: skip


@pytest.mark.parametrize(("case", "spoil", "sentence"), SPOILED)
def test_what_is_wrong_is_named(case: WindowCase, spoil: Callable[[WindowInputs], object], sentence: str) -> None:
    inputs = make_window_inputs(replace(case, **GAPS))

    def call(given: WindowInputs) -> torch.Tensor | None:
        out = _right(given)
        spoil(given)
        return out

    errors = judge_window(inputs, call)
    assert any(sentence in error for error in errors), errors
    assert len(errors) == 1


def test_a_token_that_comes_in_ages_the_others() -> None:
    fresh = TrueValue.of_states(_one(1)).after(torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1))
    assert (fresh.aged.item(), fresh.tokens) == (1, 1)
