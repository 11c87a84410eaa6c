"""Drafts: what verify leaves alone, what commit and advance make of accepted counts, and layers in one launch."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from la_core import SpecViolation
from la_core.conformance.compare import same_bits
from la_core.conformance.tolerances import window_out_tolerance
from la_core.conformance.window_cases import ADVANCE, COMMIT, LAYERS, RAGGED, VERIFY, WindowCase
from la_core.conformance.window_inputs import WindowInputs
from la_core.conformance.window_target import WindowTarget, on_all_rows
from la_core.conformance.window_truth import WindowTruth

fp32 = torch.float32
FIRST = replace(VERIFY, N=8, T=4, lengths=(0, 0, 0, 0), io_dtype=fp32, out_dtype=fp32)
"""Drafts for windows that are empty, as engines have them that keep no window between steps."""


def _commit(windows: WindowTarget, inputs: WindowInputs, accepted: tuple[int, ...] | int) -> None:
    counts = accepted if isinstance(accepted, int) else on_all_rows(accepted, inputs.s_offsets)
    windows.commit(inputs.window, inputs.s, inputs.s_offsets, inputs.decay_scales, counts)


def _tokens(inputs: WindowInputs, t: int) -> tuple[torch.Tensor, ...]:
    """Arguments of a decode with the drafts `t`."""
    q, k, v = (tensor[:, t].contiguous() for tensor in (inputs.q, inputs.k, inputs.v))
    return q, k, v, inputs.s, inputs.s_offsets, inputs.decay_scales


@pytest.mark.parametrize("length", [0, 3])
def test_verify_leaves_the_state_bit_identical_even_when_it_is_nan(windows: WindowTarget, length: int) -> None:
    """A flag that only drops a returned state is not enough: nothing is written."""
    for fill in (math.nan, 1.0):
        inputs = windows.inputs(replace(VERIFY, lengths=(length,) * 4))
        inputs.s.fill_(fill)
        before = [tensor.clone() for tensor in (inputs.s, inputs.window.start, inputs.window.length)]
        windows.run(inputs)
        after = (inputs.s, inputs.window.start, inputs.window.length)
        assert all(same_bits(was, now) for was, now in zip(before, after, strict=True))


def test_verify_twice_and_commit_once_is_once(windows: WindowTarget) -> None:
    """The second verify may bring other drafts; the first ones are forgotten. Nothing is committed by itself."""
    windows.needs("verify", "commit")
    once, twice = windows.inputs(FIRST), windows.inputs(FIRST)
    other = windows.inputs(replace(FIRST, seed=1))
    windows.verify(other.q, other.k, other.v, *_pool(twice), out=other.out)
    for inputs in (once, twice):
        windows.run(inputs)
        _commit(windows, inputs, (4, 1, 0, 3))
    assert same_bits(once.s, twice.s)
    assert same_bits(once.window.k, twice.window.k)


def test_an_abandoned_verify_leaves_no_trace(windows: WindowTarget) -> None:
    """Drafts that nobody accepts are places that are not pending: what follows has the same bits."""
    windows.needs("verify")
    plain, abandoned = windows.inputs(VERIFY), windows.inputs(VERIFY)
    other = windows.inputs(replace(VERIFY, seed=1))
    windows.verify(other.q, other.k, other.v, *_pool(abandoned), out=other.out)
    out, expected = windows.run(abandoned), windows.run(plain)
    assert out is not None
    assert expected is not None
    assert same_bits(out, expected)


def test_verify_and_a_commit_of_two_is_two_decodes(windows: WindowTarget) -> None:
    """Then a third, recurrent, decode reads the slot that the commit wrote: each step is right given the one before."""
    windows.needs("verify", "commit")
    drafts, plain = windows.inputs(FIRST), windows.inputs(FIRST)
    out = windows.run(drafts)
    assert out is not None
    assert drafts.truth().outputs.keys() == {(b, t) for b in range(4) for t in range(4)}
    _commit(windows, drafts, 2)
    tolerance = {"rtol": 0.0, "atol": _loose(plain.truth(), plain)}
    outs = [windows.decode(*_tokens(plain, t), out=torch.empty_like(out[:, t])) for t in range(2)]
    for t in range(2):
        torch.testing.assert_close(out[:, t], outs[t], **tolerance)
    third = [windows.decode(*_tokens(inputs, 2), out=torch.empty_like(out[:, 2])) for inputs in (drafts, plain)]
    torch.testing.assert_close(third[0], third[1], **tolerance)
    torch.testing.assert_close(out[:, 2], third[1], **tolerance)


def test_accepted_counts_down_to_none(windows: WindowTarget) -> None:
    """Accepted [0, 4, 0, 1]: rows with 0 keep their slot bit for bit, since 0 - 1 is no index."""
    case = replace(COMMIT, lengths=(0, 0, 0, 0), counts=(0, 4, 0, 1))
    inputs = windows.inputs(case)
    before = inputs.s.clone()
    windows.assert_right(inputs)
    states, was = (s.unflatten(0, (case.P, case.H)) for s in (inputs.s, before))
    changed = {slot for slot in range(case.P) if not same_bits(states[slot], was[slot])}
    assert changed == {0, 1}
    windows.assert_conforms(windows.fit(replace(ADVANCE, lengths=(0, 0, 0, 0), counts=(0, 4, 0, 1))))


@pytest.mark.many
@pytest.mark.parametrize("base", [COMMIT, LAYERS, ADVANCE], ids=["commit", "commit_layers", "advance"])
@pytest.mark.parametrize("wrong", [9, -1, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_accepted_counts_out_of_range_are_limited_by_a_backend_and_refused_on_a_cpu(
    windows: WindowTarget, base: WindowCase, wrong: int, dtype: torch.dtype
) -> None:
    """One more than there is room for, and one less than none: never a wild access."""
    case = replace(base, counts=(1, 2, 0, 5), counts_dtype=dtype)
    inputs = windows.inputs(case)
    assert isinstance(inputs.counts, torch.Tensor)
    inputs.counts[1] = wrong
    if windows.device == "cpu":
        before = {name: buffer.clone() for name, buffer in inputs.buffers.items()}
        with pytest.raises(SpecViolation, match="accepted"):
            windows.run(inputs)
        assert all(same_bits(before[name], buffer) for name, buffer in inputs.buffers.items())
    # What a limited count brings in must be numbers.
    for tensor in (inputs.window.k, inputs.window.v):
        tensor[..., 0, :, :, :] = tensor[..., 0, :, :, :].nan_to_num(nan=0.5)
    windows.assert_right(inputs, windows.run_unchecked)


def test_accepted_counts_beyond_32_bits_are_limited(windows: WindowTarget) -> None:
    for base in (COMMIT, ADVANCE):
        inputs = windows.inputs(replace(base, counts=(1, 2, 0, 5), counts_dtype=torch.int64))
        assert isinstance(inputs.counts, torch.Tensor)
        inputs.counts[1], inputs.counts[3] = 2**32 + 1, -(2**32) + 2
        for tensor in (inputs.window.k, inputs.window.v):
            tensor[0] = tensor[0].nan_to_num(nan=0.5)
        windows.assert_right(inputs, windows.run_unchecked)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_draft_lengths_out_of_range_are_limited(windows: WindowTarget, dtype: torch.dtype) -> None:
    inputs = windows.inputs(
        replace(RAGGED, lengths=(0, 4, 2, 3), counts_dtype=dtype, counts=(4, 4, 0, 3), out_dtype=fp32)
    )
    assert isinstance(inputs.counts, torch.Tensor)
    inputs.counts[0], inputs.counts[1], inputs.counts[2] = 5, 2**31 - 1, -1
    windows.assert_right(inputs, windows.run_unchecked)


def test_placeholder_tokens_behind_a_draft_length_enter_nothing(windows: WindowTarget) -> None:
    """T = 4 with lengths [1, 4]: with NaN in its drafts 1 to 3, row 0 commits what one decode step gives, and its
    outputs behind are zero.
    """
    windows.needs("verify", "commit")
    case = replace(FIRST, B=2, offsets=(4, 1), starts=(7, 2), lengths=(0, 0), counts=(1, 4))
    inputs, step = windows.inputs(case), windows.inputs(case)
    assert bool(inputs.k[0, 1:].isnan().all())
    out = windows.run(inputs)
    assert out is not None
    assert same_bits(out[0, 1:], torch.zeros_like(out[0, 1:]))
    _commit(windows, inputs, (1, 4))
    windows.run(step)
    step.window.length.copy_(on_all_rows([0, 0, 0, 0, 1, 0], step.window.length))
    windows.fold(step.window, step.s, step.s_offsets[:1].contiguous(), step.decay_scales)
    states, alone = (s.unflatten(0, (case.P, case.H))[4] for s in (inputs.s, step.s))
    assert bool(torch.isfinite(states).all())
    assert same_bits(states, alone)


def test_a_row_without_room_says_so(windows: WindowTarget) -> None:
    """NaN for each of its drafts, nothing written, and its neighbours do not notice; on a CPU a sentence."""
    full, roomy = (windows.inputs(replace(VERIFY, lengths=(0, 5, 2, 3))) for _ in range(2))
    roomy.window.length[0] = 4
    if windows.device == "cpu":
        before = {name: buffer.clone() for name, buffer in full.buffers.items()}
        with pytest.raises(SpecViolation, match="5 pending tokens and 4 drafts in row 1, slot 0"):
            windows.run(full)
        assert all(same_bits(before[name], buffer) for name, buffer in full.buffers.items())
    out, expected = windows.run_unchecked(full), windows.run_unchecked(roomy)
    assert out is not None
    assert expected is not None
    assert bool(out[1].isnan().all())
    assert same_bits(out[[0, 2, 3]], expected[[0, 2, 3]])
    windows.assert_conforms(windows.fit(replace(RAGGED, lengths=(4, 8, 8, 7), counts=(4, 1, 0, 2))))


@pytest.mark.parametrize("T", [1, 2, 4, 8, 16])
def test_verify_writes_no_slot_whatever_the_number_of_drafts(windows: WindowTarget, T: int) -> None:
    """No mode is inferred from T: one draft is not a decode step, and N drafts are not a prefill."""
    for N in {T, 16}:
        case = replace(VERIFY, N=N, T=T, lengths=(0, N - T, 0, N - T), starts=(N - 1, 0, N // 2, N - 1), H=1)
        windows.assert_conforms(windows.fit(case))


@pytest.mark.many
@pytest.mark.parametrize("start", [0, 5, 8, 83])
@pytest.mark.parametrize("length", [-5, 8, 9, 2**31 - 1])
def test_cursors_out_of_range_are_limited(windows: WindowTarget, start: int, length: int) -> None:
    """What la_core cannot see on a GPU: a length is cut to 0 ... N and a start taken modulo N."""
    for base in (replace(RAGGED, H=1, out_dtype=fp32), replace(COMMIT, H=1, counts=(4, 0, 0, 5)), ADVANCE):
        counts = (1, 0, 0, 1) if base is ADVANCE else base.counts
        inputs = windows.inputs(replace(base, lengths=(0, 8, 8, 3), counts=counts))
        inputs.window.start[0] = start
        inputs.window.length[0] = length
        windows.assert_right(inputs, windows.run_unchecked)


@pytest.mark.parametrize("start", [-1, -(2**31), 2**31 - 1])
def test_cursors_that_mean_nothing_touch_no_other_slot(windows: WindowTarget, start: int) -> None:
    for base in (replace(RAGGED, H=1, out_dtype=fp32), replace(COMMIT, H=1), ADVANCE):
        inputs, clean = (windows.inputs(base) for _ in range(2))
        inputs.window.start[0] = start
        windows.run_unchecked(inputs)
        windows.run_unchecked(clean)
        H = base.H
        assert same_bits(inputs.s[H:], clean.s[H:])
        for name in ("k", "v", "length"):
            assert same_bits(getattr(inputs.window, name)[1:], getattr(clean.window, name)[1:])


@pytest.mark.parametrize("layout", ["vk", "kv"])
@pytest.mark.parametrize("state_dtype", [fp32, torch.bfloat16], ids=str)
def test_layers_in_one_launch_are_commits_of_each_layer(
    windows: WindowTarget, layout: str, state_dtype: torch.dtype
) -> None:
    """Bit for bit, with slopes and tokens of their own."""
    case = replace(LAYERS, state_layout=layout, state_dtype=state_dtype, L=2, G=1, pool_gap=7)  # type: ignore[arg-type]
    stacked, one_by_one = windows.inputs(case), windows.inputs(case)
    windows.run(stacked)
    for layer in range(case.L):
        windows.commit(
            one_by_one.window.layer(layer),
            one_by_one.s[layer],
            one_by_one.s_offsets,
            one_by_one.decay_scales[layer],
            one_by_one.counts,
        )
    assert same_bits(stacked.buffers["s"], one_by_one.buffers["s"])


def test_a_fold_is_a_commit_of_nothing_more(windows: WindowTarget) -> None:
    folded, committed = windows.inputs(COMMIT), windows.inputs(COMMIT)
    windows.fold(*(getattr(folded, name) for name in ("window", "s", "s_offsets", "decay_scales")))
    _commit(windows, committed, 0)
    assert same_bits(folded.s, committed.s)


def test_a_number_for_all_rows_is_that_number_in_every_row(windows: WindowTarget) -> None:
    """Padding rows included, whose own counts mean nothing."""
    for base in (COMMIT, ADVANCE, replace(LAYERS, L=2)):
        some = replace(base, H=1, V=64, lengths=(0, 5, 2, 3), offsets=(2, 0, -1, 1))
        for count in (0, 3):
            number = windows.inputs(replace(some, counts=(count,) * 4, counts_dtype=torch.int32))
            tensor = windows.inputs(replace(some, counts=(count,) * 4, counts_dtype=torch.int32))
            windows.run(tensor)
            windows.run(replace(number, counts=count))
            assert same_bits(number.s, tensor.s)
            assert same_bits(number.window.length, tensor.window.length)


def test_a_row_is_brought_in_once_for_all_layers(windows: WindowTarget) -> None:
    """fold, fold, clear: the cursors stay until all layers have used them, and then begin behind the old tokens."""
    windows.needs("commit", "advance")
    inputs = windows.inputs(LAYERS)
    before = inputs.window.start.clone()
    for layer in range(3):
        windows.fold(inputs.window.layer(layer), inputs.s[layer], inputs.s_offsets, inputs.decay_scales[layer], room=5)
    assert same_bits(inputs.window.start, before)
    windows.clear(inputs.window, inputs.s_offsets, room=5)
    # Slots 2, 0, 5 and 1 hold 0, 4, 8 and 3 of 8: those with 4 and 8 lack room for 5.
    assert inputs.window.length[[2, 0, 5, 1]].tolist() == [0, 0, 0, 3]
    assert inputs.window.start[[2, 0, 5, 1]].tolist() == [7, 2, 3, 5]


def _pool(inputs: WindowInputs) -> tuple[object, ...]:
    return inputs.s, inputs.s_offsets, inputs.decay_scales, inputs.window


def _loose(truth: WindowTruth, inputs: WindowInputs) -> float:
    """Twice what the truth allows the worst output: for results of two ways to one value."""
    worst = 0.0
    for true in truth.outputs.values():
        tolerance = window_out_tolerance(fp32, inputs.case.K, inputs.decay_scales, true.tokens)
        norms = (part.norm(dim=1) for part in (true.value, true.magnitude, true.aged))
        worst = max(worst, float(tolerance.allowed(*norms, true.value.shape[1]).max()))
    return 2 * worst


def test_an_idle_row_keeps_a_window_that_verify_has_filled(windows: WindowTarget) -> None:
    """Four drafts accepted into four places, then a step in which the row has none: its tokens are still there."""
    windows.needs("verify", "advance")
    case = replace(VERIFY, N=4, T=4, lengths=(0, 0, 0, 0), starts=(0, 1, 2, 3), H=1)
    inputs = windows.inputs(case)
    windows.run(inputs)
    windows.advance(inputs.window, inputs.s_offsets, 4)
    before = inputs.window.length.clone()
    assert before[inputs.s_offsets.long()].tolist() == [4] * case.B
    windows.advance(inputs.window, inputs.s_offsets, on_all_rows([0] * case.B, inputs.window.length))
    assert same_bits(inputs.window.length, before)
