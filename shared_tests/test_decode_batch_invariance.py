"""A row's bits depend on the row alone: not on the batch, its place in it, the pool, the strides, or the run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from la_core import use_overlap
from la_core.conformance.compare import same_bits
from la_core.conformance.decode_cases import DecodeCase
from la_core.conformance.decode_inputs import DecodeInputs
from la_core.conformance.target import Target

ALL = tuple(range(40))
CASES = [
    DecodeCase(B=40, P=40, H=3, K=128, V=128, offsets=ALL, out_dtype=torch.float32),
    DecodeCase(B=40, P=40, H=3, K=128, V=64, offsets=ALL, out_dtype=torch.float32, state_layout="kv"),
    DecodeCase(B=40, P=40, H=2, K=64, V=128, offsets=ALL, out_dtype=torch.float32, state_dtype=torch.bfloat16),
    DecodeCase(B=40, P=40, H=6, G=2, K=64, V=64, offsets=ALL, io_dtype=torch.float32),
    DecodeCase(B=40, P=40, H=1, K=96, V=1, offsets=ALL, io_dtype=torch.float32),
]
LARGE = [
    DecodeCase(B=40, P=40, H=8, K=128, V=128, offsets=ALL, out_dtype=torch.float32),
    DecodeCase(B=40, P=40, H=16, K=128, V=128, offsets=ALL, out_dtype=torch.float32, state_dtype=torch.bfloat16),
    DecodeCase(B=40, P=40, H=2, K=256, V=256, offsets=ALL, out_dtype=torch.float32),
    DecodeCase(B=40, P=40, H=2, K=256, V=256, offsets=ALL, out_dtype=torch.float32, state_layout="kv"),
]
"""20 MiB of states: a kernel that is cut by the size of the batch is cut in more than one way here."""

LARGE_SLOTS = DecodeCase(B=40, P=40, H=32, K=128, V=128, offsets=ALL, out_dtype=torch.float32)
"""2 MiB in each slot, for kernels that are cut by that too."""


def _of_rows(inputs: DecodeInputs, rows: list[int], pool_rows: int, slots: list[int]) -> DecodeInputs:
    """The same rows with other neighbours: a batch of `rows`, row i in `slots[i]` of a pool of `pool_rows` slots."""
    H = inputs.decay_scales.shape[0]
    states = inputs.s.unflatten(0, (-1, H))
    matrix = inputs.s.stride()[1:]
    V, K = inputs.s.shape[1:]
    pool = torch.full((pool_rows * H * V * K,), torch.nan, dtype=inputs.s.dtype, device=inputs.s.device)
    s = pool.as_strided((pool_rows * H, V, K), (V * K, *matrix))
    for row, slot in zip(rows, slots, strict=True):
        if slot >= 0:
            s[slot * H : (slot + 1) * H].copy_(states[row])
    return replace(
        inputs,
        q=inputs.q[rows],
        k=inputs.k[rows],
        v=inputs.v[rows],
        s=s,
        s_offsets=torch.tensor(slots, dtype=inputs.s_offsets.dtype, device=inputs.s.device),
        out=None if inputs.out is None else torch.empty_like(inputs.out[rows]),
        buffers={},
    )


@pytest.mark.parametrize("case", CASES + LARGE, ids=lambda case: case.id)
def test_a_row_has_the_same_bits_in_every_batch(target: Target, case: DecodeCase) -> None:
    _compare_batches(target, case)


@pytest.mark.needs_gpu
@pytest.mark.parametrize("case", [*CASES, *LARGE, LARGE_SLOTS], ids=lambda case: case.id)
def test_a_row_has_the_same_bits_in_every_batch_that_overlaps(target: Target, case: DecodeCase) -> None:
    with use_overlap():
        _compare_batches(target, case)


def _compare_batches(target: Target, case: DecodeCase) -> None:
    whole = target.inputs(case)
    original = target.inputs(case)
    out = target.decode(whole)
    H = case.H
    batches = [
        ([17], 1, [0]),
        ([17], 300, [255]),
        ([39, 17], 40, [3, 39]),
        ([17, 3, 5, 17], 9, [8, 2, 0, -1]),
        ([0, 1, 17], 4, [-1, 2, 0]),
        (list(reversed(range(40))), 41, [(7 * i) % 41 for i in range(40)]),
        ([*range(33)], 33, [*range(33)]),
        ([*range(32)], 32, [*reversed(range(32))]),
    ]
    for rows, pool_rows, slots in batches:
        other = _of_rows(original, rows, pool_rows, slots)
        got = target.decode(other)
        for i, (row, slot) in enumerate(zip(rows, slots, strict=True)):
            if slot >= 0:
                assert same_bits(got[i], out[row]), f"output of row {row} in batch {rows}"
                states = other.s[slot * H : (slot + 1) * H]
                assert same_bits(states, whole.s[row * H : (row + 1) * H]), f"state of row {row} in batch {rows}"


@pytest.mark.needs_gpu
@pytest.mark.parametrize(("B", "H"), [(66_000, 1), (2, 66_000), (260, 260)])
def test_more_rows_and_heads_than_an_axis_of_a_grid_holds(target: Target, B: int, H: int) -> None:
    """Every state is written, and rows at the ends and around the limits are what they are alone."""
    case = target.fit(DecodeCase(B=B, P=B, H=H, K=16, V=16, offsets=tuple(range(B)), out_dtype=torch.float32))
    whole, original = target.inputs(case), target.inputs(case)
    out = target.decode(whole)
    assert bool(torch.isfinite(out).all())
    assert bool((whole.s != original.s).flatten(1).any(1).all())
    for row in {0, 1, 32_767, 32_768, 65_535, 65_536, B - 1} & set(range(B)):
        alone = _of_rows(original, [row], 1, [0])
        assert same_bits(target.decode(alone)[0], out[row]), f"output of row {row}"
        assert same_bits(alone.s, whole.s[row * H : (row + 1) * H]), f"state of row {row}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_strides_gaps_and_alignment_change_no_bit(target: Target, case: DecodeCase) -> None:
    plain = target.inputs(case)
    out = target.decode(plain)
    for change in ({"shift": 1}, {"shift": 3}, {"fused_qkv": True}, {"pool_gap": 1}, {"pool_gap": 64, "out_gap": 3}):
        other = target.inputs(replace(case, **change))
        assert same_bits(target.decode(other), out), change
        assert same_bits(other.s, plain.s), change


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_every_run_gives_the_same_bits(target: Target, case: DecodeCase) -> None:
    first = target.inputs(case)
    out = target.decode(first)
    # On a GPU the order of thread blocks differs from run to run.
    for _ in range(2 if target.device == "cpu" else 5):
        again = target.inputs(case)
        assert same_bits(target.decode(again), out)
        assert same_bits(again.s, first.s)


def test_offset_dtype_changes_no_bit(target: Target) -> None:
    first, second = (target.inputs(replace(CASES[0], offsets_dtype=d)) for d in (torch.int32, torch.int64))
    assert same_bits(target.decode(first), target.decode(second))
    assert same_bits(first.s, second.s)


def test_overlap_with_the_previous_kernel_changes_no_bit(target: Target) -> None:
    """Layers in a row, each reading what the one before writes, with slots of their own; the first takes longest."""
    _compare_overlap(target, rows=8, heads=4)


@pytest.mark.needs_gpu
def test_overlap_of_large_calls_changes_no_bit(target: Target) -> None:
    """The same with 512 states of 2 MiB in each slot, for kernels that are cut by that."""
    _compare_overlap(target, rows=16, heads=32)


def _compare_overlap(target: Target, rows: int, heads: int) -> None:
    most = rows if target.device == "cpu" else 2048 // heads
    long = target.fit(DecodeCase(B=most, P=most + 3, H=heads, K=128, V=128))
    short = [target.fit(DecodeCase(B=rows, P=rows + 3, H=heads, K=128, V=128, seed=seed)) for seed in range(1, 6)]

    def run(enabled: bool) -> list[torch.Tensor]:
        first, layers = target.inputs(long), [target.inputs(case) for case in short]
        outputs = [torch.full_like(first.v, torch.nan)]
        # Nothing between the calls: another kernel there would end before the next decode starts.
        with use_overlap(enabled):
            target.decode(replace(first, out=outputs[0]))
            for layer in layers:
                x = outputs[-1][-rows:]
                outputs.append(target.decode(replace(layer, q=x, k=x)))
        return [*outputs, first.s, *(layer.s for layer in layers)]

    run(True)  # compiles
    for got, expected in zip(run(True), run(False), strict=True):
        assert same_bits(got, expected)
