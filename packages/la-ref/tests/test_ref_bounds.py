"""What la-ref promises beyond the contract: bounded memory, no loop over rows or heads, cost in proportion."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from count_allocations import Allocations

import la_ref.blocks
import la_ref.decode
from la_core import decode
from la_core.conformance.decode_cases import NON_IDENTITY, DecodeCase
from la_core.conformance.decode_inputs import judge_decode, make_decode_inputs
from la_core.conformance.target import Target

MIB = 1 << 20


def _measure(case: DecodeCase) -> Allocations:
    inputs = make_decode_inputs(case)
    out = torch.empty_like(inputs.v)
    decode(*inputs.tensors(), out=out, backend="ref")
    with Allocations() as allocations:
        decode(*inputs.tensors(), out=out, backend="ref")
    return allocations


def test_the_counter_sees_what_is_allocated_and_freed() -> None:
    with Allocations() as allocations:
        first = torch.empty(MIB)
        second = first + 1
        del first
        third = second * 2
    assert allocations.peak == 8 * MIB + 4 * MIB - 4 * MIB
    assert third.shape == second.shape


@pytest.mark.parametrize(
    "case",
    [
        DecodeCase(B=64, P=64, H=16, K=128, V=128),
        DecodeCase(B=300, P=300, H=8, K=128, V=128, padding=0.1),
        DecodeCase(B=64, P=64, H=16, K=128, V=128, state_dtype=torch.bfloat16, state_layout="kv"),
        DecodeCase(B=2, P=2, H=64, K=256, V=256, G=8),
        DecodeCase(B=2, P=2, H=2, K=2048, V=2048),
        DecodeCase(B=2, P=2, H=20_000, K=256, V=1, offsets=(-1, 1)),
        DecodeCase(B=2, P=2, H=20_000, G=5000, K=1, V=256, offsets=(1, 0)),
        DecodeCase(B=9000, P=9000, H=4, K=256, V=1, padding=0.1, state_dtype=torch.bfloat16),
    ],
    ids=lambda case: case.id,
)
@pytest.mark.parametrize("read_back", [True, False], ids=["cpu", "as-on-a-gpu"])
def test_extra_memory_stays_below_64_mib_however_large_the_batch(
    monkeypatch: pytest.MonkeyPatch, case: DecodeCase, read_back: bool
) -> None:
    if not read_back:
        monkeypatch.setattr(la_ref.blocks, "can_read_back", lambda problem: False)
        monkeypatch.setitem(la_ref.blocks.BLOCK_BYTES, "cpu", la_ref.blocks.BLOCK_BYTES["cuda"])
    assert _measure(case).peak <= 64 * MIB


def test_operations_grow_with_blocks_not_with_rows_or_heads() -> None:
    """512 times the rows x heads in one block: the same number of operations."""
    small = _measure(DecodeCase(B=2, P=2, H=2, K=16, V=16))
    large = _measure(DecodeCase(B=64, P=64, H=32, K=16, V=16))
    assert large.operations == small.operations


@pytest.mark.parametrize("block_bytes", [1, 4 * 64 * 64, 4 * 64 * 64 * 3, 4 * 64 * 64 * 4 * 2, 1 << 30])
@pytest.mark.parametrize("chunk_bytes", [1, 8 * (64 + 64) * 3, 8 << 20])
@pytest.mark.parametrize("state_layout", ["vk", "kv"])
def test_every_way_to_cut_a_batch_gives_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, block_bytes: int, chunk_bytes: int, state_layout: str
) -> None:
    """Down to one value of V, one head, one row at a time."""
    case = replace(
        NON_IDENTITY, B=6, V=64, H=4, G=2, offsets=(2, -1, 0, 5, -2, 1), state_layout=state_layout,
        out_dtype=torch.float32,
    )  # fmt: skip
    whole = make_decode_inputs(case)
    expected = decode(*whole.tensors(), out=whole.out, backend="ref")
    monkeypatch.setitem(la_ref.blocks.BLOCK_BYTES, "cpu", block_bytes)
    monkeypatch.setattr(la_ref.decode, "CHUNK_BYTES", chunk_bytes)
    target = Target("ref", "cpu")
    cut = make_decode_inputs(case)
    assert judge_decode(cut, target.decode) == []
    assert torch.equal(cut.out, expected)
    live = [row for slot in (2, 0, 5, 1) for row in range(slot * 4, slot * 4 + 4)]
    assert torch.equal(cut.s[live], whole.s[live])


@pytest.mark.parametrize("rows", [0.5, 1, 3])
def test_blocks_of_padding_as_a_gpu_sees_them(monkeypatch: pytest.MonkeyPatch, rows: float) -> None:
    """The path without read-back, run on a CPU: some blocks without a live row, some with one."""
    monkeypatch.setattr(la_ref.blocks, "can_read_back", lambda problem: False)
    monkeypatch.setitem(la_ref.blocks.BLOCK_BYTES, "cpu", int(4 * 64 * 128 * 4 * rows * 1.1))
    target = Target("ref", "cpu")
    for offsets in (
        (2, -1, -2, -3, -4, -5, 0, 5),
        (-1, -2, -3, 4, 1, -1, -1, -1),
        (-1,) * 8,
        (0, 1, 2, 3, 4, 5, -1, -1),
    ):
        for state_dtype in (torch.float32, torch.bfloat16):
            inputs = make_decode_inputs(replace(NON_IDENTITY, B=8, offsets=offsets, state_dtype=state_dtype))
            assert judge_decode(inputs, target.decode) == []
