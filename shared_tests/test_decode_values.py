"""Output and new state of single calls and of sequences, against float64 and against cases worked by hand."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from la_core.conformance.compare import out_errors, same_bits, state_errors
from la_core.conformance.decode_cases import NON_IDENTITY, REFERENCE_CASES, SAMPLE_CASES, DecodeCase
from la_core.conformance.decode_inputs import judge_decode
from la_core.conformance.target import Target
from la_core.conformance.tolerances import UNIT_ROUNDOFF, state_tolerance

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize("case", SAMPLE_CASES, ids=lambda case: case.id)
def test_sample_case(target: Target, case: DecodeCase) -> None:
    target.assert_conforms(target.fit(case))


@pytest.mark.parametrize("case", REFERENCE_CASES, ids=lambda case: case.id)
def test_reference_case(target: Target, case: DecodeCase) -> None:
    target.assert_conforms(case)


@st.composite
def decode_cases(draw: st.DrawFn) -> DecodeCase:
    """Any legal call of moderate size."""
    groups = draw(st.integers(1, 4))
    slots = draw(st.integers(0, 12))
    live = draw(st.permutations(range(slots)))[: draw(st.integers(0, slots))]
    padding = draw(st.lists(st.integers(-(2**31), -1), max_size=4))
    offsets = tuple(draw(st.permutations([*live, *padding])))
    sizes = st.one_of(st.sampled_from((64, 128, 256)), st.integers(1, 80))
    dtypes = st.sampled_from((bf16, fp16, fp32))
    return DecodeCase(
        B=len(offsets),
        P=slots,
        H=groups * draw(st.integers(1, 3)),
        G=groups,
        K=draw(sizes),
        V=draw(sizes),
        io_dtype=draw(dtypes),
        state_dtype=draw(dtypes),
        out_dtype=draw(st.one_of(st.none(), dtypes)),
        offsets_dtype=draw(st.sampled_from((torch.int32, torch.int64))),
        offsets=offsets,
        state_layout=draw(st.sampled_from(("vk", "kv"))),
        softmax_scale=draw(st.one_of(st.none(), st.sampled_from((0.0, 1.0)), st.floats(-4, 4))),
        fused_qkv=draw(st.booleans()),
        pool_gap=draw(st.sampled_from((0, 1, 16, 100))),
        out_gap=draw(st.sampled_from((0, 1, 8))),
        shift=draw(st.integers(0, 9)),
        seed=draw(st.integers(0, 2**16)),
    )


@given(case=decode_cases())
def test_any_legal_call(target: Target, case: DecodeCase) -> None:
    target.assert_conforms(case)


def test_one_step_by_hand(target: Target) -> None:
    """S = 0, k = e1, v = e2: only S[2, 1] becomes 1, and q = 3 e1 reads it as 3 * scale."""
    inputs = target.inputs(replace(NON_IDENTITY, B=1, P=1, H=1, offsets=(0,), io_dtype=fp32, out_dtype=fp32))
    for tensor in (inputs.q, inputs.k, inputs.v, inputs.s):
        tensor.zero_()
    inputs.k[0, 0, 1] = 1
    inputs.v[0, 0, 2] = 1
    inputs.q[0, 0, 1] = 3
    out = target.decode(replace(inputs, softmax_scale=0.5))
    expected_state = torch.zeros_like(inputs.s)
    expected_state[0, 2, 1] = 1
    expected_out = torch.zeros_like(out)
    expected_out[0, 0, 2] = 1.5
    assert torch.equal(inputs.s, expected_state)
    assert torch.equal(out, expected_out)


@pytest.mark.parametrize("io_dtype", [bf16, fp16, fp32], ids=str)
@pytest.mark.parametrize("state_dtype", [bf16, fp16, fp32], ids=str)
def test_bits_are_read_as_the_dtype_they_are(target: Target, io_dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    """S = 0 and q = k = v = 1.5: every state is 2.25, every output K * 1.5**3. fp16 bits read as bf16 give 0.1."""
    case = replace(NON_IDENTITY, io_dtype=io_dtype, state_dtype=state_dtype, softmax_scale=1.0, out_dtype=fp32)
    inputs = target.inputs(case)
    for tensor in (inputs.q, inputs.k, inputs.v):
        tensor.fill_(1.5)
    inputs.s.zero_()
    out = target.decode(inputs)
    assert bool((out == inputs.q.shape[2] * 1.5**3).all())
    live = inputs.s.unflatten(0, (case.P, case.H))[list(case.offsets or ())]
    assert bool((live == 2.25).all())


@pytest.mark.parametrize("default", [bf16, fp16, torch.float64], ids=str)
def test_the_default_dtype_of_torch_changes_no_bit(target: Target, default: torch.dtype) -> None:
    """An engine sets it while it builds a model."""
    case = target.fit(replace(NON_IDENTITY, out_dtype=fp32))
    expected, inputs = target.inputs(case), target.inputs(case)
    out = target.decode(expected)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        got = target.decode(inputs)
    finally:
        torch.set_default_dtype(before)
    assert same_bits(got, out)
    assert same_bits(inputs.s, expected.s)


def test_dtypes_in_every_order(target: Target) -> None:
    """A kernel made for one combination of dtypes must not serve another, whichever came first."""
    variants = [
        replace(NON_IDENTITY, io_dtype=bf16, offsets_dtype=torch.int64),
        replace(NON_IDENTITY, io_dtype=fp16),
        replace(NON_IDENTITY, io_dtype=fp32, state_dtype=bf16),
    ]
    for order in itertools.permutations(variants):
        for case in order:
            target.assert_conforms(target.fit(case))


@pytest.mark.parametrize("decay", [0.0, 1000.0])
def test_decay_at_the_ends(target: Target, decay: float) -> None:
    """Slope 0 accumulates exactly; slope 1000 forgets everything, also an old state of any size."""
    case = replace(
        NON_IDENTITY, io_dtype=fp32, out_dtype=fp32, decays=(decay, 0.5, decay, 2.0), softmax_scale=1.0, V=64
    )
    inputs = target.inputs(case)
    for tensor in (inputs.q, inputs.k, inputs.v):
        tensor.copy_(torch.arange(tensor.numel()).view_as(tensor) % 5 - 2)
    inputs.s.fill_(3)
    offsets = list(case.offsets or ())
    outer = torch.einsum("bhv,bhk->bhvk", inputs.v, inputs.k)
    expected = outer + (3 if decay == 0 else 0)
    out = target.decode(inputs)
    states = inputs.s.unflatten(0, (case.P, case.H))[offsets]
    for h in (0, 2):
        assert torch.equal(states[:, h], expected[:, h])
        assert torch.equal(out[:, h], torch.einsum("bvk,bk->bv", expected[:, h], inputs.q[:, h]))


def test_a_forgotten_key_stays_forgotten(target: Target) -> None:
    """A huge old state, slope 40 and three steps: the result is that of a fresh state, without a trace of the old."""
    case = replace(NON_IDENTITY, H=1, decays=(40.0,), io_dtype=fp32, out_dtype=fp32)
    inputs, fresh = target.inputs(case), target.inputs(case)
    inputs.s.fill_(1e6)
    fresh.s.zero_()
    for _ in range(3):
        out = target.decode(inputs)
    truth = fresh.truth()
    assert list(out_errors(out, truth, inputs.decay_scales, inputs.q.shape[2])) == []
    assert list(state_errors(inputs.s, inputs.s_offsets, truth, inputs.decay_scales)) == []


def test_error_is_flat_over_the_slopes(target: Target) -> None:
    """From 0.01 to 50, no slope is worse than the tolerance allows."""
    decays = tuple(torch.logspace(-2, math.log10(50), 12).tolist())
    target.assert_conforms(target.fit(replace(NON_IDENTITY, H=12, decays=decays, io_dtype=fp32, out_dtype=fp32)))


def test_a_slow_decay_is_not_rounded_away(target: Target) -> None:
    """1000 steps of slope 0.001 leave exp(-1) in a float32 pool. In a bf16 pool each step rounds back to 1."""
    steps = 1000
    for state_dtype, expected in ((fp32, math.exp(-1)), (bf16, 1.0)):
        case = replace(NON_IDENTITY, B=1, P=1, H=1, V=64, offsets=(0,), decays=(0.001,), state_dtype=state_dtype)
        inputs = target.inputs(case)
        inputs.s.fill_(1)
        inputs.k.zero_()
        inputs.v.zero_()
        for _ in range(steps):
            target.decode(inputs)
        if state_dtype is bf16:
            assert bool((inputs.s == expected).all())
        else:
            per_step = state_tolerance(fp32, inputs.decay_scales).arithmetic.item() + UNIT_ROUNDOFF[fp32]
            assert (inputs.s.double() - expected).abs().max() <= steps * per_step


@pytest.mark.parametrize("stored", [bf16, fp16], ids=str)
@pytest.mark.parametrize("where", ["state", "out"])
def test_results_round_to_nearest_even(target: Target, stored: torch.dtype, where: str) -> None:
    """Ties go to the even neighbour, what is above a tie goes up, what is below goes down; for both signs."""
    ulp = torch.finfo(stored).eps
    steps = torch.tensor([0.5, 1.5, 2.5, 3.5, 0.5 + 2**-6, 0.5 - 2**-6, 0.25, 0.75, 1.0], dtype=torch.float64) * ulp
    values = torch.cat([1 + steps, -1 - steps])
    exact = torch.tensor([0, 2, 2, 4, 1, 0, 0, 1, 1], dtype=torch.float64) * ulp
    expected = torch.cat([1 + exact, -1 - exact]).to(stored)
    assert torch.equal(values.float().to(stored), expected), "torch rounds to nearest even"
    case = replace(
        NON_IDENTITY,
        B=1,
        P=1,
        H=1,
        offsets=(0,),
        io_dtype=fp32,
        state_dtype=stored if where == "state" else fp32,
        out_dtype=stored if where == "out" else fp32,
        softmax_scale=1.0,
    )
    inputs = target.inputs(case)
    for tensor in (inputs.q, inputs.k, inputs.v, inputs.s):
        tensor.zero_()
    count = min(len(values), inputs.v.shape[2])
    inputs.q[..., 0] = 1
    inputs.k[..., 0] = 1
    inputs.v[0, 0, :count] = values[:count].float()
    out = target.decode(inputs)
    got = out[0, 0, :count] if where == "out" else inputs.s[0, :count, 0]
    assert same_bits(got.cpu(), expected[:count])


def test_nan_in_a_named_state_stays(target: Target) -> None:
    """A slot is cleared by its owner, with zeros: a decode step never repairs what an earlier tenant left."""
    inputs = target.inputs(replace(NON_IDENTITY, H=1))
    inputs.s[2, 3, 5] = torch.nan
    out = target.decode(inputs)
    assert bool(inputs.s[2, 3, 5].isnan())
    assert bool(out[0, 0, 3].isnan())
    assert bool(torch.isfinite(out[1:]).all())


def test_a_sequence_with_requests_that_join_and_leave(target: Target) -> None:
    """Every step of a changing batch is right, given the states that the step before left."""
    steps = [(2, 0, 5, 1), (2, -1, 5, 1), (3, 0, -1, 1), (4, 0, 2, -1), (-1, -1, 2, 5), (1, 3, 2, 0)]
    inputs = target.inputs(NON_IDENTITY)
    inputs.s.copy_(torch.randn(inputs.s.shape, generator=torch.Generator().manual_seed(1)))
    for step, offsets in enumerate(steps):
        inputs.s_offsets.copy_(torch.tensor(offsets))
        random = torch.Generator().manual_seed(step)
        for tensor in (inputs.q, inputs.k, inputs.v):
            tensor.copy_(torch.randn(tensor.shape, generator=random))
        assert judge_decode(inputs, target.decode) == []


def test_output_comes_from_the_unrounded_new_state(target: Target) -> None:
    """With a bf16 pool the output is computed before the state is rounded: 1 + 2**-10 is read as it is."""
    case = replace(NON_IDENTITY, H=1, decays=(0.0,), state_dtype=bf16, io_dtype=fp32, out_dtype=fp32, softmax_scale=1.0)
    inputs = target.inputs(case)
    for tensor in (inputs.q, inputs.k, inputs.v):
        tensor.zero_()
    inputs.s.fill_(1)
    inputs.q[..., 0] = 1
    inputs.k[..., 0] = 2.0**-10
    inputs.v.fill_(1)
    out = target.decode(inputs)
    assert bool((out == 1 + 2.0**-10).all())
    assert bool((inputs.s == 1).all())


def test_results_do_not_depend_on_uninitialised_memory(target: Target) -> None:
    """A missing out is allocated over freed NaN: padding rows are zero all the same."""
    case = replace(NON_IDENTITY, offsets=(2, -1, 5, -3))
    inputs = target.inputs(case)
    del_me = [torch.full_like(inputs.v, torch.nan) for _ in range(8)]
    del del_me
    out = target.decode(inputs)
    assert same_bits(out[1], torch.zeros_like(out[1]))
    assert same_bits(out[3], torch.zeros_like(out[3]))
