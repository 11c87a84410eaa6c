"""Which slot is read and written, and that nothing else is."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from la_core.conformance.compare import same_bits
from la_core.conformance.decode_cases import BIG_BATCH, IDENTITY, NON_IDENTITY, PADDED, REVERSED, DecodeCase
from la_core.conformance.decode_inputs import DecodeInputs, make_decode_inputs
from la_core.conformance.target import Target

INT32_MIN = -(2**31)


def test_identity_offsets(target: Target) -> None:
    target.assert_conforms(target.fit(IDENTITY))


def test_non_identity_offsets(target: Target) -> None:
    target.assert_conforms(target.fit(NON_IDENTITY))


def test_reversed_offsets(target: Target) -> None:
    target.assert_conforms(target.fit(REVERSED))


def test_state_write_back(target: Target) -> None:
    """Every named slot changes in its first and last value; every other slot keeps its bits."""
    inputs = _canaries(target, NON_IDENTITY)
    before = inputs.s.clone()
    target.decode(inputs)
    was, now = (s.unflatten(0, (6, 4)) for s in (before, inputs.s))
    for slot in (2, 0, 5, 1):
        assert bool((now[slot, :, 0, 0] != was[slot, :, 0, 0]).all())
        assert bool((now[slot, :, -1, -1] != was[slot, :, -1, -1]).all())
    for slot in (3, 4):
        assert same_bits(now[slot], was[slot])


def test_big_batch(target: Target) -> None:
    target.assert_conforms(target.fit(BIG_BATCH))


def test_a_pool_much_larger_than_the_batch(target: Target) -> None:
    target.assert_conforms(target.fit(replace(NON_IDENTITY, B=1, P=500, offsets=(437,))))


@pytest.mark.parametrize(
    "offsets",
    [(-1, 3), (-1, -1, 2), (-1, -1, 0), (-7, 4), (INT32_MIN, 4), (-1, -4, -12), (-5, -20, 0)],
    ids=str,
)
def test_padding_touches_no_slot(target: Target, offsets: tuple[int, ...]) -> None:
    """Slot 0, the last slot and every slot that a negative number could wrap to are canaries."""
    case = replace(NON_IDENTITY, B=len(offsets), P=5, offsets=offsets)
    inputs = _canaries(target, case)
    before = inputs.s.clone()
    out = target.decode(inputs)
    named = {slot for slot in offsets if slot >= 0}
    was, now = (s.unflatten(0, (5, 4)) for s in (before, inputs.s))
    changed = {slot for slot in range(5) if not same_bits(was[slot], now[slot])}
    assert changed == named
    for b, slot in enumerate(offsets):
        if slot < 0:
            assert same_bits(out[b], torch.zeros_like(out[b]))


def test_mostly_padding(target: Target) -> None:
    offsets = [-1] * 64
    for row, slot in ((3, 7), (31, 0), (32, 8), (63, 2)):
        offsets[row] = slot
    target.assert_conforms(target.fit(replace(NON_IDENTITY, B=64, P=9, H=2, offsets=tuple(offsets))))


def test_padding_output_is_written_whatever_was_there(target: Target) -> None:
    case = replace(PADDED, out_dtype=torch.float32, out_gap=16)
    inputs = target.inputs(case)
    assert inputs.out is not None
    inputs.buffers["out"].fill_(7.0)
    target.decode(inputs)
    for b, slot in enumerate(case.offsets or ()):
        assert bool((inputs.out[b] == 0).all()) == (slot < 0)
    row = inputs.out[0].numel()
    gaps = inputs.buffers["out"].as_strided((case.B - 1, 16), (inputs.out.stride(0), 1), row)
    assert bool((gaps == 7.0).all())


@pytest.mark.parametrize("scale", [-1.0, 1e300, math.inf, math.nan], ids=str)
def test_padding_output_is_zero_whatever_the_scale(target: Target, scale: float) -> None:
    """A zero that is made before it is scaled comes out negative, or as NaN."""
    case = replace(PADDED, softmax_scale=scale)
    out = target.decode(target.inputs(case))
    for b, slot in enumerate(case.offsets or ()):
        if slot < 0:
            assert same_bits(out[b], torch.zeros_like(out[b]))


def test_padding_leaves_real_rows_as_they_are_alone(target: Target) -> None:
    """NaN in q, k and v of padding rows reaches no other row: same bits as without the padding."""
    padded = target.inputs(replace(NON_IDENTITY, B=6, offsets=(2, -1, 0, 5, -2, 1)))
    rows = [0, 2, 3, 5]
    alone = DecodeInputs(
        *(t[rows].contiguous() for t in (padded.q, padded.k, padded.v)),
        padded.s.clone(),
        padded.s_offsets[rows].contiguous(),
        padded.decay_scales,
        None,
        None,
        {},
    )
    out, out_alone = target.decode(padded), target.decode(alone)
    assert same_bits(out[rows], out_alone)
    assert same_bits(padded.s, alone.s)
    assert bool(torch.isfinite(out).all())


def test_all_rows_padding(target: Target) -> None:
    inputs = _canaries(target, replace(NON_IDENTITY, offsets=(-1, -2, -3, -4)))
    before = inputs.s.clone()
    out = target.decode(inputs)
    assert bool((out == 0).all())
    assert same_bits(before, inputs.s)


@pytest.mark.parametrize("state_layout", ["vk", "kv"])
def test_an_empty_pool_has_only_padding(target: Target, state_layout: str) -> None:
    case = replace(NON_IDENTITY, P=0, offsets=(-1, -2, -3, -4), state_layout=state_layout)
    target.assert_conforms(target.fit(case))


def test_an_empty_batch_is_a_no_op(target: Target) -> None:
    """Before and after a real call."""
    empty = replace(NON_IDENTITY, B=0, offsets=())
    for case in (empty, NON_IDENTITY, empty, replace(empty, out_dtype=torch.float32), replace(empty, P=0)):
        inputs = target.inputs(case)
        before = inputs.s.clone()
        out = target.decode(inputs)
        assert out.shape == inputs.v.shape
        assert case.B or same_bits(before, inputs.s)


@pytest.mark.parametrize(
    ("dtype", "outside"),
    [(torch.int32, (6, 6 + 3, 2**31 - 1)), (torch.int64, (2**32 + 3, 2**62, -(2**32) + 4))],
    ids=["int32", "int64"],
)
def test_offsets_beyond_the_pool_are_padding_to_a_backend(
    target: Target, dtype: torch.dtype, outside: tuple[int, ...]
) -> None:
    """What la_core cannot see on a GPU: `>= P` must not touch memory, nor alias a slot modulo P or 2**32."""
    case = replace(NON_IDENTITY, B=6, P=6, offsets=(2, -1, 0, -2, 5, -3), offsets_dtype=dtype)
    inputs = _canaries(target, case)
    problem = target.problem(inputs)
    beyond = inputs.s_offsets.clone()
    beyond[[1, 3, 5]] = torch.tensor(outside, dtype=beyond.dtype, device=beyond.device)
    before = inputs.s.clone()
    out = torch.full((6, 4, problem.V), torch.nan, dtype=problem.out_dtype, device=inputs.s.device)
    target.backend.decode(problem, inputs.q, inputs.k, inputs.v, inputs.s, beyond, inputs.decay_scales, 0.125, out)
    for row in (1, 3, 5):
        assert same_bits(out[row], torch.zeros_like(out[row]))
    assert bool((out[[0, 2, 4]] != 0).any())
    was, now = (s.unflatten(0, (6, 4)) for s in (before, inputs.s))
    assert {slot for slot in range(6) if not same_bits(was[slot], now[slot])} == {0, 2, 5}


def test_two_rows_of_one_slot_touch_no_other_slot(target: Target) -> None:
    """Undefined for that slot, defined for all others; la_core refuses it where it can see the values."""
    case = replace(NON_IDENTITY, offsets=(2, 0, 5, 1))
    inputs = _canaries(target, case)
    problem = target.problem(inputs)
    twice = torch.tensor([2, 0, 2, 1], dtype=inputs.s_offsets.dtype, device=inputs.s.device)
    before = inputs.s.clone()
    out = torch.empty(4, 4, problem.V, dtype=problem.out_dtype, device=inputs.s.device)
    target.backend.decode(problem, inputs.q, inputs.k, inputs.v, inputs.s, twice, inputs.decay_scales, 0.125, out)
    was, now = (s.unflatten(0, (6, 4)) for s in (before, inputs.s))
    assert {slot for slot in range(6) if not same_bits(was[slot], now[slot])} <= {0, 1, 2}


@pytest.mark.parametrize("what", ["state", "q", "k", "v"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_nan_and_infinity_stay_in_their_row_and_head(target: Target, what: str, poison: float) -> None:
    row, head = 1, 2
    case = replace(NON_IDENTITY, io_dtype=torch.float32)
    clean, dirty = target.inputs(case), target.inputs(case)
    slot = (case.offsets or ())[row]
    if what == "state":
        dirty.s[slot * case.H + head, 5, 7] = poison
    else:
        getattr(dirty, what)[row, head, 3] = poison
    out, dirty_out = target.decode(clean), target.decode(dirty)
    others = torch.ones(case.B, case.H, dtype=torch.bool, device=out.device)
    others[row, head] = False
    assert same_bits(out[others], dirty_out[others])
    assert not bool(torch.isfinite(dirty_out[row, head]).all())
    rows = torch.ones(case.P * case.H, dtype=torch.bool, device=out.device)
    rows[slot * case.H + head] = False
    assert same_bits(clean.s[rows], dirty.s[rows])


def test_one_extra_element_of_stride_between_rows_of_the_pool(target: Target) -> None:
    """Gaps keep their bits, and slot addresses follow the stride, not V * K."""
    for gap in (1, 8, 256):
        for layout in ("vk", "kv"):
            target.assert_conforms(target.fit(replace(NON_IDENTITY, pool_gap=gap, state_layout=layout)))


@pytest.mark.parametrize("state_layout", ["vk", "kv"])
def test_slots_beyond_two_to_the_31_elements(target: Target, state_layout: str) -> None:
    """A view whose rows lie far apart; memory that is not touched costs nothing on a CPU."""
    row_stride, slots = 2**21, 2**10 + 2
    probes = (2**10 + 1, 2**10, 2**10 - 1, 2**9, 2**9 - 1, 1)
    # A 32-bit element offset wraps these slots onto these; a byte offset wraps at half of that.
    canaries = [slot for slot in sorted({p % 2**m for p in probes for m in (8, 9, 10)}) if slot not in probes]
    case = replace(NON_IDENTITY, B=6, P=6, H=1, offsets=(0, 1, 2, 3, 4, 5), state_dtype=torch.bfloat16)
    small = target.inputs(replace(case, state_layout=state_layout))
    V, K = small.s.shape[1:]
    elements = (slots - 1) * row_stride + V * K
    assert elements > 2**31
    if target.device != "cpu" and torch.cuda.mem_get_info()[0] < 3 * elements:
        pytest.fail(f"this test needs {3 * elements >> 30} GiB of free device memory")
    buffer = torch.empty(elements, dtype=torch.bfloat16, device=target.device)
    s = buffer.as_strided((slots, V, K), (row_stride, *small.s.stride()[1:]))
    for row, slot in enumerate(probes):
        s[slot].copy_(small.s[row])
    for slot in canaries:
        s[slot].fill_(slot)
    offsets = torch.tensor(probes, dtype=torch.int32, device=target.device)
    far = replace(small, s=s, s_offsets=offsets, buffers={})
    assert target.backend.refusal(target.problem(far)) is None, "strides are run-time values, no reason to refuse"
    out = target.decode(far)
    expected = target.decode(small)
    assert same_bits(out, expected)
    for row, slot in enumerate(probes):
        assert same_bits(s[slot].contiguous(), small.s[row].contiguous())
    for slot in canaries:
        assert bool((s[slot] == slot).all())


@pytest.mark.parametrize("row_stride", [2**31, 2**33 + 7, 1])
def test_the_stride_of_a_pool_of_one_row_does_not_matter(target: Target, row_stride: int) -> None:
    """A dimension of size 1 has no stride that is ever used, however large it is or small."""
    case = replace(NON_IDENTITY, B=1, P=1, H=1, offsets=(0,))
    plain, odd = target.inputs(case), target.inputs(case)
    strided = replace(odd, s=odd.s.as_strided(odd.s.shape, (row_stride, *odd.s.stride()[1:])))
    assert same_bits(target.decode(strided), target.decode(plain))
    assert same_bits(odd.s, plain.s)


@pytest.mark.needs_gpu
def test_every_wrap_point_of_a_16_gib_pool(target: Target) -> None:
    """H = 32, K = V = 128, fp32: slots of 2 MiB, where byte and element offsets of 31 and 32 bits wrap."""
    H, K, V, slots = 32, 128, 128, 8194
    if torch.cuda.mem_get_info()[0] < 20 << 30:
        pytest.skip("not run: needs 20 GiB of free device memory")
    pool = torch.empty(slots * H, V, K, device=target.device)
    probes = [8193, 8192, 8191, 4096, 4095, 2048, 2047, 1024, 1023]
    aliases = [0, 1, 2, 1022, 2046, 4094]
    small = make_decode_inputs(
        DecodeCase(B=9, P=9, H=H, K=K, V=V, offsets=tuple(range(9)), out_dtype=torch.float32), target.device
    )
    view, small_view = pool.view(slots, H, V, K), small.s.view(9, H, V, K)
    for row, slot in enumerate(probes):
        view[slot].copy_(small_view[row])
    for slot in aliases:
        view[slot].fill_(slot + 1)
    offsets = torch.tensor(probes, dtype=torch.int32, device=target.device)
    out = target.decode(replace(small, s=pool, s_offsets=offsets, out=None)).float()
    expected = target.decode(replace(small, out=None)).float()
    assert same_bits(out, expected)
    for row, slot in enumerate(probes):
        assert same_bits(view[slot], small_view[row])
    for slot in aliases:
        assert bool((view[slot] == slot + 1).all())


def _canaries(target: Target, case: DecodeCase) -> DecodeInputs:
    """Inputs whose slot p holds the constant p + 1."""
    inputs = target.inputs(case)
    values = torch.arange(1, case.P + 1, device=inputs.s.device).repeat_interleave(case.H)
    inputs.s.copy_(values[:, None, None].expand_as(inputs.s))
    for tensor in (inputs.q, inputs.k, inputs.v):
        tensor.nan_to_num_(nan=1.0)
    return inputs
