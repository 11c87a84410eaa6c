"""A row's bits depend on the row alone: not on the batch, its place in it, the pool, the strides, or the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from la_core import use_overlap
from la_core.conformance.compare import same_bits
from la_core.conformance.window_cases import COMMIT, DECODE, FOLD, LAYERS, RAGGED, WindowCase
from la_core.conformance.window_inputs import WindowInputs
from la_core.conformance.window_target import WindowTarget

GPU_ROWS = 36
"""More rows than any block."""


def _many(base: WindowCase, rows: int = 12, **changes: object) -> WindowCase:
    """A case of some rows, in each phase of the window."""
    N = base.N
    counts = tuple(b % 3 for b in range(rows)) if base.op in ("verify", "commit") else None
    most = N - 2 if counts is not None else N
    cursors = {"starts": tuple(b % N for b in range(rows)), "lengths": tuple(b % (most + 1) for b in range(rows))}
    sizes = {"B": rows, "P": rows, "offsets": tuple(range(rows)), "H": 1, "K": 64, "V": 64, "T": min(base.T, 2)}
    return replace(base, **{**sizes, **cursors, "counts": counts, **changes})  # type: ignore[arg-type]


CASES = [
    _many(DECODE, out_dtype=torch.float32),
    _many(RAGGED, out_dtype=torch.float32),
    _many(FOLD, V=128),
    _many(DECODE, out_dtype=torch.float32, state_layout="kv", state_dtype=torch.bfloat16, K=128),
    _many(RAGGED, io_dtype=torch.float32, state_layout="kv", H=2, G=1),
    _many(LAYERS, L=2, H=2, G=1),
    _many(DECODE, io_dtype=torch.float32, H=4, G=2),
    _many(COMMIT, state_dtype=torch.bfloat16),
    _many(COMMIT, state_layout="kv", io_dtype=torch.float32),
]
LARGE = [
    _many(DECODE, GPU_ROWS, H=16, K=128, V=128, out_dtype=torch.float32),
    _many(DECODE, GPU_ROWS, H=8, K=256, V=256, state_layout="kv"),
    _many(RAGGED, GPU_ROWS, H=16, K=128, V=128, T=8, N=16, out_dtype=torch.float32),
    _many(COMMIT, GPU_ROWS, H=16, K=128, V=128, state_dtype=torch.bfloat16),
    *(_many(base, GPU_ROWS) for base in (DECODE, RAGGED, COMMIT)),
]
"""A kernel that is cut by the size of the batch is cut in more than one way here."""


def _batches(R: int) -> list[tuple[list[int], int, list[int]]]:
    """Rows of a batch of R rows that meet again in other ones: rows, slots of the pool, offsets."""
    r = R // 2
    return [
        ([r], 1, [0]),
        ([r], 300, [255]),
        ([R - 1, r], R + 4, [3, R + 3]),
        ([r, 3, 5, r], 9, [8, 2, 0, -1]),
        ([0, 1, r], 4, [-1, 2, 0]),
        (list(reversed(range(R))), R + 1, [(R - 1) * i % (R + 1) for i in range(R)]),
        ([*range(R - 3)], R - 3, [*range(R - 3)]),
        ([*range(R - 4)], R - 4, [*reversed(range(R - 4))]),
    ]


def _compare_batches(windows: WindowTarget, case: WindowCase) -> None:
    whole, original = windows.inputs(case), windows.inputs(case)
    out = windows.run(whole)
    for rows, slots, offsets in _batches(case.B):
        other = original.of_rows(rows, offsets, slots)
        got = windows.run(other)
        for i, (row, slot) in enumerate(zip(rows, offsets, strict=True)):
            if slot >= 0:
                if out is not None:
                    assert got is not None
                    assert same_bits(got[i], out[row]), f"output of row {row} in batch {rows}"
                for name, ours, alone in zip(
                    ("state", "k", "v"), _of_slot(whole, row), _of_slot(other, slot), strict=True
                ):
                    assert same_bits(ours, alone), f"{name} of row {row} in batch {rows}"


def _of_slot(inputs: WindowInputs, slot: int) -> tuple[torch.Tensor, ...]:
    """States and window of a slot."""
    H = inputs.case.H
    states = inputs.s[..., slot * H : (slot + 1) * H, :, :]
    return states, inputs.window.k[..., slot, :, :, :], inputs.window.v[..., slot, :, :, :]


@pytest.mark.many
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_row_has_the_same_bits_in_every_batch(windows: WindowTarget, case: WindowCase) -> None:
    _compare_batches(windows, case)


@pytest.mark.needs_gpu
@pytest.mark.parametrize("case", LARGE, ids=lambda case: case.id)
def test_a_row_has_the_same_bits_in_every_large_batch(windows: WindowTarget, case: WindowCase) -> None:
    _compare_batches(windows, case)


@pytest.mark.needs_gpu
@pytest.mark.parametrize("case", CASES + LARGE, ids=lambda case: case.id)
def test_overlap_changes_no_bit(windows: WindowTarget, case: WindowCase) -> None:
    """Alone and in a row of calls for layers with pools of their own."""
    expected = [windows.inputs(case) for _ in range(4)]
    outs = [windows.run(inputs) for inputs in expected]
    inputs = [windows.inputs(case) for _ in range(4)]
    torch.cuda.synchronize()
    with use_overlap():
        got = [windows.run(one) for one in inputs]
    torch.cuda.synchronize()
    for ours, theirs, one, other in zip(got, outs, inputs, expected, strict=True):
        assert ours is None or (theirs is not None and same_bits(ours, theirs))
        assert all(same_bits(buffer, other.buffers[name]) for name, buffer in one.buffers.items() if name != "out")


@pytest.mark.many
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_strides_gaps_and_alignment_change_no_bit(windows: WindowTarget, case: WindowCase) -> None:
    small = {"B": 6, "P": 6, "offsets": (5, 0, 3, 1, 2, 4)}
    cut = {name: getattr(case, name)[:6] for name in ("starts", "lengths", "counts") if getattr(case, name) is not None}
    case = replace(case, **small, **cut)
    plain = windows.inputs(case)
    out = windows.run(plain)
    for change in (
        {"shift": 1},
        {"shift": 3, "window_gap": 1},
        {"fused_qkv": True, "fused_window": True},
        {"pool_gap": 64, "out_gap": 3, "window_gap": 8},
        {"tokens_first": True},
    ):
        other = windows.inputs(replace(case, **change))
        got = windows.run(other)
        assert out is None or (got is not None and same_bits(got, out)), change
        assert same_bits(other.s.contiguous(), plain.s.contiguous()), change
        assert same_bits(other.window.k.contiguous(), plain.window.k.contiguous()), change


@pytest.mark.many
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_the_same_call_gives_the_same_bits(windows: WindowTarget, case: WindowCase) -> None:
    _repeat(windows, replace(case, seed=9), 2)


@pytest.mark.needs_gpu
@pytest.mark.parametrize("case", LARGE, ids=lambda case: case.id)
def test_the_same_large_call_gives_the_same_bits_ten_times(windows: WindowTarget, case: WindowCase) -> None:
    _repeat(windows, case, 10)


def _repeat(windows: WindowTarget, case: WindowCase, times: int) -> None:
    make: Callable[[], WindowInputs] = lambda: windows.inputs(case)  # noqa: E731
    first = make()
    out = windows.run(first)
    for _ in range(times - 1):
        again = make()
        got = windows.run(again)
        assert out is None or (got is not None and same_bits(got, out))
        assert same_bits(again.s, first.s)


@pytest.mark.parametrize("T", [1, 2, 3])
def test_a_draft_has_the_same_bits_whatever_comes_behind_it(windows: WindowTarget, T: int) -> None:
    """Output t of four drafts is output t of t + 1 drafts, ragged or not: later drafts are invisible to it."""
    case = replace(RAGGED, counts=None, lengths=(0, 4, 2, 3), out_dtype=torch.float32)
    whole = windows.inputs(case)
    out = windows.run(whole)
    assert out is not None
    part = windows.inputs(case)
    short = replace(
        part,
        q=part.q[:, :T],
        k=part.k[:, :T],
        v=part.v[:, :T],
        out=torch.empty_like(out[:, :T]),
        case=replace(case, T=T),
    )
    got = windows.run(short)
    assert got is not None
    assert same_bits(got, out[:, :T].contiguous())
    ragged = windows.inputs(replace(case, counts=(T,) * 4))
    got = windows.run(ragged)
    assert got is not None
    assert same_bits(got[:, :T].contiguous(), out[:, :T].contiguous())
