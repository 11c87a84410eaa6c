"""Every operator on a window, call by call, against float64 and against cases worked by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from la_core.conformance.compare import same_bits
from la_core.conformance.tolerances import UNIT_ROUNDOFF, window_out_tolerance
from la_core.conformance.window_cases import (
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
from la_core.conformance.window_inputs import WindowInputs
from la_core.conformance.window_target import WindowTarget

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize("case", SAMPLE_CASES, ids=lambda case: case.id)
def test_sample_case(windows: WindowTarget, case: WindowCase) -> None:
    windows.assert_conforms(windows.fit(case))


@pytest.mark.many
@pytest.mark.parametrize("case", REFERENCE_CASES, ids=lambda case: case.id)
def test_reference_case(windows: WindowTarget, case: WindowCase) -> None:
    windows.assert_conforms(case)


@st.composite
def window_cases(draw: st.DrawFn) -> WindowCase:
    """Any legal call of moderate size."""
    op = draw(st.sampled_from(("decode", "verify", "fold", "commit", "advance", "clear")))
    groups = draw(st.integers(1, 3))
    heads = groups * draw(st.integers(1, 2))
    slots = draw(st.integers(0, 8))
    live = draw(st.permutations(range(slots)))[: draw(st.integers(0, min(slots, 4)))]
    padding = draw(st.lists(st.integers(-(2**31), -1), max_size=3))
    offsets = tuple(draw(st.permutations([*live, *padding])))
    N = draw(st.integers(1, 20))
    sizes = st.one_of(st.sampled_from((64, 128)), st.integers(1, 40))
    dtypes = st.sampled_from((bf16, fp16, fp32))
    gaps = st.sampled_from((0, 1, 16, 100))
    return WindowCase(
        op,
        B=len(offsets),
        P=slots,
        N=N,
        T=draw(st.integers(1, N)) if op == "verify" else 1,
        H=heads,
        G=groups,
        L=draw(st.integers(0, 2)) if op == "commit" else 0,
        K=draw(sizes),
        V=draw(sizes),
        io_dtype=draw(dtypes),
        state_dtype=draw(dtypes),
        window_dtype=draw(st.sampled_from((None, fp32))),
        out_dtype=draw(st.one_of(st.none(), dtypes)),
        offsets_dtype=draw(st.sampled_from((torch.int32, torch.int64))),
        offsets=offsets,
        counts_dtype=draw(st.sampled_from((None, torch.int32, torch.int64))),
        room=draw(st.one_of(st.none(), st.integers(1, N))) if op not in ("decode", "verify") else None,
        state_layout=draw(st.sampled_from(("vk", "kv"))),
        softmax_scale=draw(st.one_of(st.none(), st.sampled_from((0.0, 1.0)), st.floats(-4, 4))),
        decays=draw(st.one_of(st.none(), st.tuples(*[st.sampled_from((0.0, 0.01, 1.0, 40.0, 1000.0))] * heads))),
        fused_qkv=draw(st.booleans()),
        fused_window=draw(st.booleans()),
        tokens_first=draw(st.booleans()),
        pool_gap=draw(gaps),
        window_gap=draw(gaps),
        out_gap=draw(gaps),
        shift=draw(st.integers(0, 9)),
        seed=draw(st.integers(0, 2**16)),
    )


@given(case=window_cases())
def test_any_legal_call(windows: WindowTarget, case: WindowCase) -> None:
    windows.assert_conforms(case)


def _plain(windows: WindowTarget, case: WindowCase) -> WindowInputs:
    """Inputs of which every number is 0."""
    inputs = windows.inputs(replace(case, io_dtype=fp32, out_dtype=fp32, softmax_scale=1.0))
    for tensor in (inputs.q, inputs.k, inputs.v, inputs.s, inputs.window.k, inputs.window.v):
        tensor.zero_()
    return inputs


def test_decode_with_pending_tokens_by_hand(windows: WindowTarget) -> None:
    """Slope ln 2: S = 16 at [2, 1], a pending 3 * 2 and a new 1 * 4 give (16/2 + 6)/2 + 4 = 11; q = 3 reads 33."""
    inputs = _plain(
        windows, replace(DECODE, B=1, P=1, H=1, offsets=(0,), starts=(3,), lengths=(1,), decays=(math.log(2),))
    )
    inputs.s[0, 2, 1] = 16
    inputs.window.k[0, 3, 0, 1], inputs.window.v[0, 3, 0, 2] = 2, 3
    inputs.k[0, 0, 1], inputs.v[0, 0, 2], inputs.q[0, 0, 1] = 1, 4, 3
    windows.assert_right(inputs)
    out = windows.run(inputs)
    assert out is not None
    assert out[0, 0, 2].item() == pytest.approx(33, rel=8 * UNIT_ROUNDOFF[fp32])
    assert (inputs.window.k[0, 0, 0, 1].item(), inputs.window.v[0, 0, 0, 2].item()) == (1, 4)
    out[0, 0, 2] = 0
    assert not bool(out.any())


def test_only_the_named_row_and_column_of_a_state_become_one(windows: WindowTarget) -> None:
    """S = 0, a draft with k = e1 and v = e2: S[2, 1] = 1 after the commit, in both layouts; K == V would hide a
    transposed state.
    """
    for layout in ("vk", "kv"):
        case = replace(COMMIT, B=1, P=2, H=1, offsets=(1,), starts=(7,), lengths=(0,), counts=(1,), state_layout=layout)
        inputs = _plain(windows, case)
        inputs.window.k[1, 7, 0, 1] = 1
        inputs.window.v[1, 7, 0, 2] = 1
        windows.run(inputs)
        expected = torch.zeros_like(inputs.s)
        expected[1, 2, 1] = 1
        assert torch.equal(inputs.s, expected)


@pytest.mark.parametrize("io_dtype", [bf16, fp16, fp32], ids=str)
def test_bits_are_read_as_the_dtype_they_are(windows: WindowTarget, io_dtype: torch.dtype) -> None:
    """S = 0 and q = k = v = 1.5, slope 0: draft t reads (t + 1) * K * 1.5**3. fp16 bits read as bf16 give 0.1."""
    case = replace(
        VERIFY, io_dtype=io_dtype, out_dtype=fp32, softmax_scale=1.0, lengths=(0, 0, 0, 0), decays=(0.0, 0.0)
    )
    inputs = windows.inputs(case)
    for tensor in (inputs.q, inputs.k, inputs.v):
        tensor.fill_(1.5)
    inputs.s.zero_()
    out = windows.run(inputs)
    assert out is not None
    for t in range(case.T):
        assert bool((out[:, t] == (t + 1) * inputs.case.K * 1.5**3).all())


def test_dtypes_in_both_orders(windows: WindowTarget) -> None:
    """A kernel made for one combination of dtypes must not serve another, whichever came first."""
    for base in (replace(case, H=1, V=64) for case in (DECODE, RAGGED, COMMIT)):
        variants = [
            replace(base, io_dtype=bf16, offsets_dtype=torch.int64, counts_dtype=torch.int64),
            replace(base, io_dtype=bf16, window_dtype=fp32),
            replace(base, io_dtype=fp32, state_dtype=bf16),
        ]
        for case in (*variants, *reversed(variants)):
            windows.assert_conforms(windows.fit(case))


def test_decay_that_no_inverse_power_can_hold(windows: WindowTarget) -> None:
    """Slope 20 over 8 drafts is an exponent of 160, where exp(a) * exp(-b) overflows and gives NaN; slope 1000 forgets
    all but the newest token, so out_t = scale * (q_t . k_t) * v_t.
    """
    case = replace(
        VERIFY, N=16, T=8, lengths=(8, 3, 0, 5), H=3, decays=(20.0, 1000.0, 2.0), io_dtype=fp32, out_dtype=fp32
    )
    inputs = windows.inputs(case)
    windows.assert_right(inputs)
    out = windows.run(inputs)
    assert out is not None
    assert bool(torch.isfinite(out).all())
    q, k, v = (tensor[:, :, 1].double().cpu() for tensor in (inputs.q, inputs.k, inputs.v))
    expected = q.shape[-1] ** -0.5 * (q * k).sum(-1, keepdim=True) * v
    bound = window_out_tolerance(fp32, q.shape[-1], inputs.decay_scales[1:2], 16)
    magnitude = q.shape[-1] ** -0.5 * (q.abs() * k.abs()).sum(-1) * v.norm(dim=-1)
    error = (out[:, :, 1].double().cpu() - expected).norm(dim=-1)
    assert bool((error <= bound.store * expected.norm(dim=-1) + bound.arithmetic * magnitude).all())


def test_error_is_flat_over_the_slopes(windows: WindowTarget) -> None:
    """From 0.01 to 50, no slope is worse than the tolerance allows."""
    decays = tuple(torch.logspace(-2, math.log10(50), 12).tolist())
    for base in (DECODE, VERIFY, COMMIT):
        one = {"B": 1, "offsets": (3,), "starts": (2,), "lengths": (3,), "counts": (2,) if base is COMMIT else None}
        windows.assert_conforms(windows.fit(replace(base, **one, H=12, decays=decays, io_dtype=fp32, out_dtype=fp32)))


def test_a_forgotten_key_stays_forgotten(windows: WindowTarget) -> None:
    """Huge k and v in draft 0, slope 40: drafts from 3 on must not see them, as they do where exponents are clamped."""
    case = replace(VERIFY, N=16, T=8, H=1, decays=(40.0,), lengths=(0, 8, 2, 5), io_dtype=fp32, out_dtype=fp32)
    inputs, quiet = windows.inputs(case), windows.inputs(case)
    inputs.k[:, 0] *= 1e4
    inputs.v[:, 0] *= 1e4
    out, expected = windows.run(inputs), windows.run(quiet)
    assert out is not None
    assert expected is not None
    # exp(-40 * 3) * 1e8 is 1e-44: nothing is left of it.
    assert bool(((out - expected)[:, 3:].abs() <= 1e-30).all())


def test_products_are_not_cut_to_19_bits(windows: WindowTarget) -> None:
    """q = k = 1 + 2**-12 in float32: a matrix unit in TF32 would take both for 1, as some compilers do by default."""
    value = 1 + 2.0**-12
    for case in (replace(VERIFY, H=1, decays=(0.0,), lengths=(0, 0, 0, 0)), replace(DECODE, H=1, decays=(0.0,))):
        inputs = _plain(windows, case)
        inputs.window.length.zero_()
        inputs.q.fill_(value)
        inputs.k.fill_(value)
        inputs.v.fill_(1)
        windows.assert_right(inputs)


def test_output_comes_from_the_unrounded_value(windows: WindowTarget) -> None:
    """With a bf16 pool pending tokens are not rounded one by one: 1 + 2**-10 is read as it is, and 8 of them add up."""
    case = replace(FOLD, N=8, H=1, B=1, offsets=(0,), starts=(6,), lengths=(8,), decays=(0.0,), state_dtype=bf16)
    inputs = _plain(windows, case)
    inputs.s[0].fill_(1)
    inputs.window.k[0, :, 0, 0] = 2.0**-10
    inputs.window.v[0] = 1
    windows.run(inputs)
    assert bool((inputs.s[0, :, 0] == 1 + 2.0**-7).all())
    assert bool((inputs.s[0, :, 1:] == 1).all())


@pytest.mark.parametrize("stored", [bf16, fp16], ids=str)
def test_states_round_to_nearest_even(windows: WindowTarget, stored: torch.dtype) -> None:
    """Ties go to the even neighbour, when a window is folded and when decode finds it full."""
    ulp = torch.finfo(stored).eps
    values = 1 + torch.tensor([0.5, 1.5, 2.5, 0.5 + 2**-6, 0.5 - 2**-6, 0.75], dtype=torch.float64) * ulp
    expected = 1 + torch.tensor([0, 2, 2, 1, 0, 1], dtype=torch.float64) * ulp
    one = {"B": 1, "P": 1, "H": 1, "N": 1, "offsets": (0,), "starts": (0,), "lengths": (1,), "decays": (0.0,)}
    for base in (FOLD, DECODE):
        inputs = _plain(windows, replace(base, **one, state_dtype=stored))
        count = min(len(values), inputs.case.V)
        k, v = (inputs.window.k[:, 0], inputs.window.v[:, 0]) if base is FOLD else (inputs.k, inputs.v)
        k[0, 0, 0] = 1
        v[0, 0, :count] = values[:count].float()
        windows.run(inputs)
        assert torch.equal(inputs.s[0, :count, 0].double().cpu(), expected[:count])


def test_nan_in_a_named_state_stays(windows: WindowTarget) -> None:
    """A slot is cleared by its owner: neither reading nor folding repairs what an earlier tenant left."""
    inputs = windows.inputs(replace(FOLD, H=1, lengths=(3, 3, 2, 4)))
    inputs.s[2, 3, 5] = torch.nan
    windows.run(inputs)
    assert bool(inputs.s[2, 3, 5].isnan())
    assert int(inputs.s[[2, 0, 5, 1]].isnan().sum()) == 1


@pytest.mark.parametrize("default", [bf16, torch.float64], ids=str)
def test_the_default_dtype_of_torch_changes_no_bit(windows: WindowTarget, default: torch.dtype) -> None:
    """An engine sets it while it builds a model."""
    for base in (replace(case, H=1, V=64) for case in (DECODE, RAGGED, COMMIT, LAYERS)):
        expected, inputs = windows.inputs(base), windows.inputs(base)
        out = windows.run(expected)
        before = torch.get_default_dtype()
        torch.set_default_dtype(default)
        try:
            got = windows.run(inputs)
        finally:
            torch.set_default_dtype(before)
        assert out is None or (got is not None and same_bits(got, out))
        assert same_bits(inputs.s, expected.s)
        assert same_bits(inputs.window.k, expected.window.k)


@pytest.mark.many
@pytest.mark.parametrize("V", [8, 24, 40, 96, 136])
@pytest.mark.parametrize("K", [16, 80, 96])
def test_the_last_rows_of_v_are_written_or_the_size_is_refused(windows: WindowTarget, K: int, V: int) -> None:
    """A V that is no multiple of a tile must not leave the last rows of a state stale."""
    for base in (DECODE, VERIFY, COMMIT):
        windows.assert_conforms(replace(base, K=K, V=V, H=1))


@settings(max_examples=10)
@given(values=st.lists(st.integers(-3, 3), min_size=40, max_size=40), length=st.integers(0, 4), start=st.integers(0, 3))
def test_whole_numbers_without_decay_are_exact(
    windows: WindowTarget, values: list[int], length: int, start: int
) -> None:
    """Slope 0 and small whole numbers: every backend gives the very same sums, in whatever order it adds."""
    one = {"B": 1, "P": 1, "H": 1, "offsets": (0,), "starts": (start,), "lengths": (length,), "decays": (0.0,)}
    inputs = _plain(windows, replace(DECODE, **one))
    numbers = iter(values * (8 * inputs.case.K * inputs.case.V // 40 + 1))
    for tensor in (inputs.q, inputs.k, inputs.v, inputs.s, inputs.window.k, inputs.window.v):
        tensor.copy_(torch.tensor([next(numbers) for _ in range(tensor.numel())]).view(tensor.shape))
    true = inputs.truth().outputs[0, 0].value
    out = windows.run(inputs)
    assert out is not None
    assert torch.equal(out[0].double().cpu(), true)
