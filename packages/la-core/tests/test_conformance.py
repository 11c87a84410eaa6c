"""The judge itself: the truth against exact fractions, the tolerances at their edges, the comparison's verdicts."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from la_core.conformance.compare import same_bits
from la_core.conformance.decode_cases import NON_IDENTITY, REFERENCE_CASES, SAMPLE_CASES, DecodeCase
from la_core.conformance.decode_inputs import DecodeInputs, judge_decode, make_decode_inputs
from la_core.conformance.decode_truth import decode_truth
from la_core.conformance.tolerances import UNIT_ROUNDOFF, out_tolerance, state_tolerance
from la_core.spec.state_pool_rules import share_memory


def test_truth_equals_exact_fractions() -> None:
    """Slopes of 0 make the decay exactly 1; everything else is a fraction in pure Python, grouped heads included."""
    B, G, H, K, V, P = 2, 2, 4, 3, 2, 3
    numbers = iter(range(1, 1000))
    take = lambda *shape: torch.tensor(  # noqa: E731
        [((next(numbers) * 7) % 11 - 5) / 4 for _ in range(torch.Size(shape).numel())]
    ).view(shape)
    q, k, v, s = take(B, G, K), take(B, G, K), take(B, H, V), take(P * H, V, K)
    truth = decode_truth(q, k, v, s, torch.tensor([2, -1]), torch.zeros(H), 0.5)
    for h in range(H):
        for i in range(V):
            total = Fraction(0)
            for j in range(K):
                new = Fraction(s[2 * H + h, i, j].item()) + Fraction(v[0, h, i].item()) * Fraction(
                    k[0, h // 2, j].item()
                )
                assert Fraction(truth.states[0][h, i, j].item()) == new
                total += new * Fraction(q[0, h // 2, j].item())
            assert Fraction(truth.out[0, h, i].item()) == total / 2
    assert not truth.out[1].any()
    assert set(truth.states) == {0}


def test_truth_decays_by_exp_of_minus_the_slope() -> None:
    zero = torch.zeros(1, 2, 1)
    truth = decode_truth(
        zero[:, :1], zero[:, :1], zero, torch.ones(2, 1, 1), torch.tensor([0]), torch.tensor([1.0, 2.0])
    )
    assert truth.states[0].flatten().tolist() == pytest.approx([0.36787944117144233, 0.1353352832366127], rel=1e-15)


def test_tolerances_at_the_sizes_people_use() -> None:
    """What the table promises: about 5e-7 and 2e-5 for float32, half a unit of bf16 for bf16."""
    decays = torch.tensor([0.02, 1.0])
    one, nine = torch.ones(2, dtype=torch.float64), torch.full((2,), 9.0, dtype=torch.float64)
    state = state_tolerance(torch.float32, decays).allowed(one, 1.4 * one, 128 * 128)
    out = out_tolerance(torch.float32, 128, decays).allowed(one, nine, 128)
    assert bool((state < 1e-6).all())
    assert bool((out < 2e-5).all())
    rounded = out_tolerance(torch.bfloat16, 128, decays).allowed(one, nine, 128)
    assert bool((rounded < 5e-3).all())
    assert bool((rounded > UNIT_ROUNDOFF[torch.bfloat16]).all())


def test_bits_tell_nan_from_nan_and_zero_from_minus_zero() -> None:
    assert same_bits(torch.tensor([torch.nan]), torch.tensor([torch.nan]))
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))


def test_case_ids_are_unique() -> None:
    ids = [case.id for case in (*SAMPLE_CASES, *REFERENCE_CASES)]
    assert len(set(ids)) == len(ids)


def _right(inputs: DecodeInputs) -> torch.Tensor:
    truth = inputs.truth()
    for b, states in truth.states.items():
        slot, H = int(inputs.s_offsets[b]), states.shape[0]
        inputs.s[slot * H : (slot + 1) * H] = states.to(inputs.s.dtype)
    out = truth.out.to(inputs.q.dtype)
    if inputs.out is None:
        return out
    inputs.out.copy_(truth.out)
    return inputs.out


CASE = replace(NON_IDENTITY, offsets=(2, -1, 5, 1), pool_gap=3, out_gap=2)


@pytest.mark.parametrize("case", [*SAMPLE_CASES, CASE], ids=lambda case: case.id)
def test_the_truth_itself_is_judged_right(case: DecodeCase) -> None:
    assert judge_decode(make_decode_inputs(case), _right) == []


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda i: i.out[0, 1].mul_(1.02), "out of 1 of 12 (row, head) is off; worst in row 0, head 1"),
        (lambda i: i.out[3, 2, 5].fill_(torch.nan), "worst in row 3, head 2"),
        (lambda i: i.out[1].fill_(torch.nan), "out of padding row 1 must be zero"),
        (lambda i: i.s[8].copy_(i.s[8].bfloat16()), "state of 1 of 12 (row, head) is off; worst in row 0, head 0"),
        (lambda i: i.s[0].fill_(0), "the pool outside of the named slots must not change"),
        (lambda i: i.buffers["s"][8192].fill_(0), "the pool outside of the named slots must not change"),
        (lambda i: i.buffers["out"][512].fill_(0), "the gaps of out must not change"),
        (lambda i: i.q[0, 0, 0].fill_(9), "q must not change"),
        (lambda i: i.s_offsets[0].fill_(9), "s_offsets must not change"),
    ],
)
def test_what_is_wrong_is_named(spoil: object, sentence: str) -> None:
    inputs = make_decode_inputs(CASE)

    def call(given: DecodeInputs) -> torch.Tensor:
        _right(given)
        spoil(given)  # type: ignore[operator]
        assert given.out is not None
        return given.out

    spoiled_offsets = "s_offsets" in sentence
    errors = judge_decode(inputs, call) if not spoiled_offsets else _judge_ignoring_state(inputs, call)
    assert any(sentence in error for error in errors), errors


def _judge_ignoring_state(inputs: DecodeInputs, call: object) -> list[str]:
    from la_core.conformance.decode_inputs import untouched_errors

    before = {name: buffer.clone() for name, buffer in inputs.buffers.items()}
    inputs.s_offsets[0] = 4
    assert call is not None
    return untouched_errors(inputs, before)


def test_shared_memory_is_judged_exactly() -> None:
    base = torch.zeros(4, 10)
    assert not share_memory(base[:, :5], base[:, 5:])
    assert share_memory(base[:, :6], base[:, 5:])
    assert not share_memory(base[::2], base[1::2])
    assert share_memory(base[::2], base[2:])
    assert share_memory(base.view(torch.int32)[1:2], base)
    assert not share_memory(base[:0], base)
    assert not share_memory(base, torch.zeros(4, 10))
    assert share_memory(base.t()[3:4], base[2:3])
    assert not share_memory(base.t()[3:4], base[:, 4:])
