"""Which slot's states, window and cursors are read and written, and that nothing else is."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from la_core.conformance.compare import same_bits
from la_core.conformance.window_cases import (
    ADVANCE,
    CLEAR,
    COMMIT,
    DECODE,
    FOLD,
    LAYERS,
    RAGGED,
    VERIFY,
    WindowCase,
)
from la_core.conformance.window_inputs import WindowInputs
from la_core.conformance.window_target import WindowTarget, on_all_rows
from la_core.spec.kv_window import KVWindow

INT32_MIN = -(2**31)
ALL_OPS = (DECODE, RAGGED, FOLD, COMMIT, LAYERS, ADVANCE, CLEAR)
every_op = pytest.mark.parametrize("base", ALL_OPS, ids=lambda case: "commit_layers" if case.L else case.op)


@pytest.mark.many
@every_op
@pytest.mark.parametrize("offsets", [(0, 1, 2, 3), (3, 2, 1, 0), (5, 0, 3, 4)], ids=str)
def test_a_row_uses_the_slot_it_names(windows: WindowTarget, base: WindowCase, offsets: tuple[int, ...]) -> None:
    windows.assert_conforms(windows.fit(replace(base, offsets=offsets)))


@every_op
def test_a_pool_much_larger_than_the_batch(windows: WindowTarget, base: WindowCase) -> None:
    """The window is addressed by slot, states too; a buffer sized for the batch would be left behind."""
    counts = base.counts[:2] if isinstance(base.counts, tuple) else None
    case = replace(base, B=2, P=64, H=1, offsets=(63, 10), starts=(3, 2), lengths=(0, 2), counts=counts, shift=8)
    windows.assert_conforms(windows.fit(case))


@pytest.mark.many
@every_op
@pytest.mark.parametrize("offsets", [(-1, 3), (-1, 0), (-7, 4), (INT32_MIN, 4), (-5, -20)], ids=str)
def test_padding_touches_no_slot(windows: WindowTarget, base: WindowCase, offsets: tuple[int, ...]) -> None:
    """Slot 0, the last slot and what a negative number could wrap to keep states, windows and cursors. Padded rows
    write neither `s` nor the window, not even with NaN in them, and their output is zero: -1 never means a slot.
    """
    counts = base.counts[:2] if isinstance(base.counts, tuple) else None
    case = replace(base, B=2, P=5, offsets=offsets, starts=(2, 1), lengths=(1, 2), counts=counts)
    inputs = windows.inputs(case)
    # Canaries that are numbers: NaN that is written over NaN would not be seen.
    named = [slot for slot in offsets if slot >= 0]
    for slot in set(range(5)) - set(named):
        inputs.window.k[..., slot, :, :, :] = slot + 1
        inputs.window.v[..., slot, :, :, :] = slot + 1
        inputs.s[..., slot * case.H : (slot + 1) * case.H, :, :] = slot + 1
    windows.assert_right(inputs)


@pytest.mark.parametrize("base", [DECODE, RAGGED], ids=lambda case: case.op)
@pytest.mark.parametrize("scale", [-1.0, 1e300, math.inf, math.nan], ids=str)
def test_padding_output_is_zero_whatever_was_there_and_whatever_the_scale(
    windows: WindowTarget, base: WindowCase, scale: float
) -> None:
    """`out` holds 7.0 before; a zero that is made before it is scaled comes out negative, or as NaN."""
    inputs = windows.inputs(replace(base, offsets=(2, -1, 5, -3), out_dtype=torch.float32, softmax_scale=scale))
    assert inputs.out is not None
    inputs.out.fill_(7.0)
    windows.run(inputs)
    for b in (1, 3):
        assert same_bits(inputs.out[b], torch.zeros_like(inputs.out[b]))
    if base is RAGGED:
        behind = inputs.out[2]  # its draft length is 0
        assert same_bits(behind, torch.zeros_like(behind))


@pytest.mark.parametrize("base", [DECODE, RAGGED], ids=lambda case: case.op)
def test_a_missing_out_is_allocated_over_freed_nan(windows: WindowTarget, base: WindowCase) -> None:
    """Skipped rows of an output from `empty` must not carry garbage onward."""
    inputs = windows.inputs(replace(base, offsets=(2, -1, 5, -3)))
    del_me = [torch.full_like(inputs.v, torch.nan) for _ in range(8)]
    del del_me
    out = windows.run(inputs)
    assert out is not None
    for b in (1, 3):
        assert same_bits(out[b], torch.zeros_like(out[b]))


@every_op
def test_many_padding_rows_share_a_number(windows: WindowTarget, base: WindowCase) -> None:
    counts = (*base.counts[:2], *([0] * 14)) if isinstance(base.counts, tuple) else None
    offsets = (3, 1, *([-1] * 14))
    case = replace(base, B=16, offsets=offsets, starts=(2,) * 16, lengths=(1,) * 16, counts=counts, H=1)
    windows.assert_conforms(windows.fit(case))


@every_op
def test_an_empty_batch_is_a_no_op_before_and_after_a_real_call(windows: WindowTarget, base: WindowCase) -> None:
    counts = () if isinstance(base.counts, tuple) else None
    empty = replace(base, B=0, offsets=(), starts=(), lengths=(), counts=counts)
    for case in (empty, base, empty, replace(empty, P=0)):
        windows.assert_conforms(windows.fit(case))


@every_op
@pytest.mark.parametrize(
    ("dtype", "outside"),
    [(torch.int32, (6, 6 + 3, 2**31 - 1)), (torch.int64, (2**32 + 3, 2**62, -(2**32) + 4))],
    ids=["int32", "int64"],
)
def test_offsets_beyond_the_pool_are_padding_to_a_backend(
    windows: WindowTarget, base: WindowCase, dtype: torch.dtype, outside: tuple[int, ...]
) -> None:
    """What la_core cannot see on a GPU: `>= P` touches no memory, nor aliases a slot modulo P or 2**32."""
    counts = (2, 1, 0, 1, 3, 1) if isinstance(base.counts, tuple) else None
    case = replace(
        base,
        B=6,
        offsets=(2, -1, 0, -2, 5, -3),
        offsets_dtype=dtype,
        starts=(1, 0, 2, 0, 3, 0),
        lengths=(1, 0, 2, 0, 0, 0),
        counts=counts,
        out_dtype=torch.float32,
    )
    inputs = windows.inputs(case)
    inputs.s_offsets[[1, 3, 5]] = on_all_rows(outside, inputs.s_offsets)
    windows.assert_right(inputs, windows.run_unchecked)


@every_op
def test_two_rows_of_one_slot_touch_no_other_slot(windows: WindowTarget, base: WindowCase) -> None:
    """Undefined for that slot, defined for all others; la_core refuses it where it can see the values."""
    inputs = windows.inputs(replace(base, out_dtype=torch.float32))
    before = [tensor.clone() for tensor in _per_slot(inputs)]
    inputs.s_offsets[2] = 2
    windows.run_unchecked(inputs)
    for was, now in zip(before, _per_slot(inputs), strict=True):
        for slot in (3, 4, 5):
            assert same_bits(was[:, slot], now[:, slot])


@pytest.mark.many
@pytest.mark.parametrize("base", ALL_OPS[:-2], ids=lambda case: "commit_layers" if case.L else case.op)
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("what", ["state", "window.k", "window.v", "k", "v", "q"])
def test_nan_and_infinity_stay_in_their_row_and_head(
    windows: WindowTarget, base: WindowCase, what: str, poison: float
) -> None:
    head, row = 1, 1
    tokens = base.op in ("decode", "verify")
    if what in "qkv" and not tokens:
        what = "state"
    lengths = (1, 3, 2, 0) if tokens else (1, 3, 2, 4)
    case = replace(base, io_dtype=torch.float32, lengths=lengths, counts=(1, 2, 1, 3) if base.counts else None)
    clean, dirty = windows.inputs(case), windows.inputs(case)
    slot = 0
    if what == "state":
        dirty.s[..., slot * case.H + head, 5, 7] = poison
    elif what.startswith("window"):
        place = (int(dirty.window.start[slot]) + 1) % case.N
        getattr(dirty.window, what[-1])[..., slot, place, head, 3] = poison
    else:
        getattr(dirty, what)[row, ..., head, 3] = poison
    out, dirty_out = windows.run(clean), windows.run(dirty)
    if out is not None:
        assert dirty_out is not None
        out, dirty_out = (t if case.op == "verify" else t[:, None] for t in (out, dirty_out))
        others = torch.ones(out.shape[:3], dtype=torch.bool)
        others[row, :, head] = False
        assert same_bits(out.cpu()[others], dirty_out.cpu()[others])
        assert not bool(torch.isfinite(dirty_out[row, 0, head]).all())
    keep = torch.ones(clean.s.shape[-3], dtype=torch.bool)
    keep[slot * case.H + head] = False
    assert same_bits(clean.s[..., keep, :, :], dirty.s[..., keep, :, :])
    if what == "state" and not tokens:
        assert not bool(torch.isfinite(dirty.s[..., slot * case.H + head, 5, 7]).any())


def test_heads_that_share_k_share_its_nan(windows: WindowTarget) -> None:
    """Grouped heads: NaN in one group's pending k reaches exactly the heads of that group."""
    case = replace(VERIFY, H=6, G=2, io_dtype=torch.float32)
    clean, dirty = windows.inputs(case), windows.inputs(case)
    dirty.window.k[0, (6 + 1) % 8, 1, 3] = math.nan
    out, dirty_out = windows.run(clean), windows.run(dirty)
    assert out is not None
    assert dirty_out is not None
    reached = dirty_out.isnan().flatten(3).any(3).any(1)
    assert reached.tolist() == [[False] * 6, [False] * 3 + [True] * 3, [False] * 6, [False] * 6]
    assert same_bits(out[:, :, :3], dirty_out[:, :, :3])


@every_op
def test_what_is_not_pending_is_never_read_as_a_number(windows: WindowTarget, base: WindowCase) -> None:
    """Bytes of an earlier tenant read back as NaN, and times zero does not remove it: places that are not pending give
    the same bits whether they hold NaN, infinity or zero.
    """
    results = []
    for fill in (math.nan, math.inf, 0.0):
        inputs = windows.inputs(base)
        for tensor in (inputs.window.k, inputs.window.v):
            tensor.copy_(tensor.nan_to_num(nan=fill, posinf=fill, neginf=fill))
        out = windows.run(inputs)
        results.append((out if out is not None else inputs.s, inputs.s))
    for out, s in results[1:]:
        assert same_bits(out, results[0][0])
        assert same_bits(s, results[0][1])


@pytest.mark.many
@pytest.mark.parametrize("gap", [1, 8, 256])
@pytest.mark.parametrize("layout", ["vk", "kv"])
@every_op
def test_gaps_keep_their_bits(windows: WindowTarget, base: WindowCase, layout: str, gap: int) -> None:
    """Slots are as far apart as the strides say, as in engines that pad them; states and windows alike."""
    case = replace(base, pool_gap=gap, window_gap=gap, out_gap=gap, state_layout=layout, H=1, V=64)  # type: ignore[arg-type]
    windows.assert_conforms(windows.fit(case))


@every_op
def test_metadata_sliced_out_of_larger_tensors(windows: WindowTarget, base: WindowCase) -> None:
    """Offsets, counts and slopes as slices that start 4 bytes in, as graph runners and parallel ranks cut them."""
    for shift in (1, 2, 3):
        windows.assert_conforms(windows.fit(replace(base, shift=shift, counts_dtype=torch.int32, H=1, V=64)))


@every_op
def test_no_argument_but_what_is_written_changes(windows: WindowTarget, base: WindowCase) -> None:
    """Inputs that overlap nothing keep every bit, with and without an `out`; decode of a full window, a commit of
    nothing and a verify without drafts included.
    """
    lengths = (base.N, 0, 1, 2)
    counts = (0, 0, 1, 2) if isinstance(base.counts, tuple) else None
    for out_dtype in (None, torch.float32):
        windows.assert_conforms(windows.fit(replace(base, lengths=lengths, counts=counts, out_dtype=out_dtype)))


@pytest.mark.parametrize("base", [DECODE, RAGGED, COMMIT], ids=lambda case: case.op)
def test_slots_beyond_two_to_the_31_elements(windows: WindowTarget, base: WindowCase) -> None:
    """States and windows whose slots lie far apart; memory that is not touched costs nothing on a CPU."""
    stride, slots = 2**21, 2**10 + 2
    probes = (2**10 + 1, 2**10, 2**9, 2**9 - 1)
    canaries = [slot for slot in sorted({p % 2**m for p in probes for m in (8, 9, 10)}) if slot not in probes]
    case = replace(base, H=1, offsets=(0, 1, 2, 3), P=4, state_dtype=torch.bfloat16)
    small = windows.inputs(case)
    case = small.case
    elements = slots * stride
    if windows.device != "cpu" and torch.cuda.mem_get_info()[0] < 7 * elements:
        pytest.fail(f"this test needs {7 * elements >> 30} GiB of free device memory")

    def far_apart(near: torch.Tensor) -> torch.Tensor:
        buffer = torch.empty(elements, dtype=torch.bfloat16, device=windows.device)
        far = buffer.as_strided((slots, *near.shape[1:]), (stride, *near.stride()[1:]))
        for row, slot in enumerate(probes):
            far[slot].copy_(near[row])
        for slot in canaries:
            far[slot].fill_(slot)
        return far

    cursors = [torch.zeros(slots, dtype=torch.int32, device=windows.device) for _ in range(2)]
    for far, near in zip(cursors, (small.window.start, small.window.length), strict=True):
        far[list(probes)] = near
    window = KVWindow(far_apart(small.window.k), far_apart(small.window.v), *cursors)
    far = replace(
        small, s=far_apart(small.s), s_offsets=on_all_rows(probes, small.s_offsets), window=window, buffers={}
    )
    assert windows.refusal(far) is None, "strides are run-time values, no reason to refuse"
    out, expected = windows.run(far), windows.run(small)
    assert out is None or (expected is not None and same_bits(out, expected))
    pairs = ((far.s, small.s), (window.k, small.window.k), (window.v, small.window.v))
    for wide, near in pairs:
        for row, slot in enumerate(probes):
            assert same_bits(wide[slot].contiguous(), near[row].contiguous())
        for slot in canaries:
            assert bool((wide[slot] == slot).all())


def test_layers_beyond_two_to_the_31_elements(windows: WindowTarget) -> None:
    """Stacked pools whose layers lie far apart."""
    stride = 2**30 + 64
    small = windows.inputs(replace(LAYERS, H=1, state_dtype=torch.bfloat16))
    elements = 2 * stride + small.s[0].numel()
    if windows.device != "cpu" and torch.cuda.mem_get_info()[0] < 3 * elements:
        pytest.fail(f"this test needs {3 * elements >> 30} GiB of free device memory")
    buffer = torch.empty(elements, dtype=torch.bfloat16, device=windows.device)
    s = buffer.as_strided(small.s.shape, (stride, *small.s.stride()[1:]))
    s.copy_(small.s)
    far = replace(small, s=s, buffers={})
    windows.run(far)
    windows.run(small)
    assert same_bits(s.contiguous(), small.s.contiguous())


def _per_slot(inputs: WindowInputs) -> list[torch.Tensor]:
    """Everything that belongs to slots, as [layers, P, ...]."""
    H, layered = inputs.case.H, inputs.case.L > 0
    s = inputs.s.unflatten(-3, (-1, H))
    tensors = [s, inputs.window.k, inputs.window.v]
    cursors = [inputs.window.start[None], inputs.window.length[None]]
    return [tensor if layered else tensor[None] for tensor in tensors] + cursors
