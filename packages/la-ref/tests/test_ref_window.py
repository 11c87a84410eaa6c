"""What la-ref promises beyond the contract for the window operators: bounded memory, and bits that know no cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from count_allocations import Allocations

import la_ref.blocks
from la_core import KVWindow, advance, clear, commit, decode, fold, verify
from la_core.conformance.compare import same_bits

MIB = 1 << 20

NAN = float("nan")


def _inputs(
    B: int,
    H: int,
    K: int,
    V: int,
    *,
    G: int | None = None,
    N: int = 5,
    T: int = 3,
    state_dtype: torch.dtype = torch.float32,
    state_layout: str = "vk",
    padding: int = 0,
) -> dict[str, Any]:
    """A batch whose windows hold 0 to N tokens; `padding` rows in front and at the end, NaN wherever it may be."""
    random = torch.Generator().manual_seed(0)
    G = G or H
    P = B + 2
    q, k = (torch.randn(B, T, G, K, generator=random).bfloat16() for _ in range(2))
    v = torch.randn(B, T, H, V, generator=random).bfloat16()
    s = torch.randn(P * H, V, K, generator=random).to(state_dtype)
    if state_layout == "kv":
        s = s.transpose(1, 2).contiguous().transpose(1, 2)
    window = KVWindow(
        torch.randn(P, N, G, K, generator=random).bfloat16(),
        torch.randn(P, N, H, V, generator=random).bfloat16(),
        torch.randint(N, (P,), generator=random).int(),
        torch.arange(P).int() % (N + 1),
    )
    offsets = torch.randperm(P, generator=random)[:B]
    for row in range(padding):
        for padded in (row, B - 1 - row):
            offsets[padded] = -1 - row
            q[padded] = k[padded] = v[padded] = NAN
    for slot in range(P):
        for i in range(int(window.length[slot]), N):
            place = (int(window.start[slot]) + i) % N
            window.k[slot, place] = window.v[slot, place] = NAN
    lengths = window.length[offsets.clamp_min(0)]
    drafts = torch.minimum(torch.arange(B) % (T + 1), N - lengths)
    return {
        "tokens": (q, k, v),
        "pool": (s, offsets, torch.linspace(0.05, 0.7, H)),
        "window": window,
        "drafts": drafts.int(),
    }


def _verify(inputs: dict[str, Any]) -> torch.Tensor:
    return verify(*inputs["tokens"], *inputs["pool"], inputs["window"], draft_lengths=inputs["drafts"], backend="ref")


def _decode(inputs: dict[str, Any]) -> torch.Tensor:
    tokens = (t[:, 0] for t in inputs["tokens"])
    return decode(*tokens, *inputs["pool"], window=inputs["window"], backend="ref")


def _commit(inputs: dict[str, Any]) -> None:
    commit(inputs["window"], *inputs["pool"], inputs["drafts"], backend="ref")


def _steps(inputs: dict[str, Any]) -> list[torch.Tensor]:
    """Every operator once, in an order an engine could use; all that was written."""
    window, (s, offsets, decays) = inputs["window"], inputs["pool"]
    outs = [_decode(inputs)]
    advance(window, offsets)
    fold(window, s, offsets, decays, room=3)
    clear(window, offsets, room=3)
    outs.append(_verify(inputs))
    _commit(inputs)
    clear(window, offsets)
    return [*outs, s, *window.tensors()]


def _measure(operator: Any, inputs: dict[str, Any]) -> tuple[Allocations, torch.Tensor | None]:
    """What a second call allocates: the first one has its facts checked."""
    operator(inputs)
    with Allocations() as allocations:
        out = operator(inputs)
    return allocations, out


@pytest.mark.parametrize("operator", [_verify, _decode, _commit])
@pytest.mark.parametrize(
    "sizes",
    [
        {"B": 48, "H": 16, "K": 128, "V": 128},
        {"B": 48, "H": 16, "K": 128, "V": 128, "padding": 4, "state_dtype": torch.bfloat16, "state_layout": "kv"},
        {"B": 2, "H": 16, "K": 128, "V": 128, "N": 64, "T": 64},
        {"B": 2, "H": 2, "K": 2048, "V": 2048, "G": 1},
        {"B": 2, "H": 8000, "K": 128, "V": 1},
    ],
    ids=lambda sizes: "-".join(f"{name}{value}" for name, value in sizes.items()),
)
@pytest.mark.parametrize("read_back", [True, False], ids=["cpu", "as-on-a-gpu"])
def test_extra_memory_stays_below_64_mib_however_large_the_batch(
    monkeypatch: pytest.MonkeyPatch, operator: Any, sizes: dict[str, Any], read_back: bool
) -> None:
    if not read_back:
        monkeypatch.setattr(la_ref.blocks, "can_read_back", lambda problem: False)
        monkeypatch.setitem(la_ref.blocks.BLOCK_BYTES, "cpu", la_ref.blocks.BLOCK_BYTES["cuda"])
    allocations, out = _measure(operator, _inputs(**sizes))
    assert allocations.peak - (0 if out is None else out.nbytes) <= 64 * MIB


@pytest.mark.parametrize("operator", [_verify, _decode, _commit])
def test_operations_grow_with_blocks_not_with_rows_or_heads(operator: Any) -> None:
    """256 times the rows x heads in one block: the same number of operations."""
    counts = []
    for rows, heads in ((12, 1), (96, 32)):
        allocations, _ = _measure(operator, _inputs(rows, heads, 4, 4, padding=1))
        counts.append(allocations.operations)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("block_bytes", [1, 4 * 40 * 24 * 3, 4 * 4 * 40 * 24 * 4])
@pytest.mark.parametrize("state_layout", ["vk", "kv"])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("read_back", [True, False], ids=["cpu", "as-on-a-gpu"])
def test_every_way_to_cut_a_batch_gives_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, block_bytes: int, state_layout: str, state_dtype: torch.dtype, read_back: bool
) -> None:
    """Down to one value of V, one head, one row at a time; with and without a look at which rows are padding."""
    sizes: dict[str, Any] = {"B": 12, "H": 4, "K": 24, "V": 40, "G": 2, "padding": 2}
    sizes |= {"state_dtype": state_dtype, "state_layout": state_layout}
    expected = _steps(_inputs(**sizes))
    monkeypatch.setattr(la_ref.blocks, "can_read_back", lambda problem: read_back)
    monkeypatch.setitem(la_ref.blocks.BLOCK_BYTES, "cpu", block_bytes)
    for now, then in zip(_steps(_inputs(**sizes)), expected, strict=True):
        assert same_bits(now, then)


@pytest.mark.parametrize("read_back", [True, False], ids=["cpu", "as-on-a-gpu"])
def test_a_batch_of_padding_writes_nothing(monkeypatch: pytest.MonkeyPatch, read_back: bool) -> None:
    monkeypatch.setattr(la_ref.blocks, "can_read_back", lambda problem: read_back)
    inputs, untouched = (_inputs(4, 2, 8, 16, padding=2) for _ in range(2))
    token, drafts, *written = _steps(inputs)
    assert not token.any()
    assert not drafts.any()
    for now, then in zip(written, (untouched["pool"][0], *untouched["window"].tensors()), strict=True):
        assert same_bits(now, then)


@pytest.mark.parametrize("read_back", [True, False], ids=["cpu", "as-on-a-gpu"])
def test_unchecked_values_are_limited(monkeypatch: pytest.MonkeyPatch, read_back: bool) -> None:
    """As on a GPU, where la-core cannot look: wild cursors and counts touch no memory of another slot."""
    monkeypatch.setattr(la_ref.blocks, "can_read_back", lambda problem: read_back)
    for module in ("window_decode", "verify", "window_cursors", "commit"):
        monkeypatch.setattr(f"la_core.ops.{module}.check_window_values", lambda *arguments: None)
    inputs, limited, untouched = (_inputs(3, 2, 8, 16, N=3) for _ in range(3))
    slots = inputs["pool"][1]
    for each, start, length, drafts, accepted in (
        (inputs, [-3, 7, 1 << 30], [-5, 99, 2], [77, 1, -2], [9, 9, -4]),
        (limited, [0, 1, (1 << 30) % 3], [0, 3, 2], [3, 1, 0], [3, 1, 0]),
    ):
        window = each["window"]
        for tensor in (window.k, window.v):
            tensor[slots] = torch.linspace(-1, 1, tensor[slots].numel()).view_as(tensor[slots]).bfloat16()
        window.start[slots] = torch.tensor(start).int()
        window.length[slots] = torch.tensor(length).int()
        each["drafts"] = torch.tensor(drafts).int()
        each["outs"] = [_verify(each)]
        each["drafts"] = torch.tensor(accepted).int()
        _commit(each)
        each["outs"].append(_decode(each))
        advance(window, slots, each["drafts"])
    out = inputs["outs"][0]
    assert out[1, :1].isnan().all(), "no room for a draft behind three tokens"
    assert not out[[0, 2]].isnan().any()
    assert not out[1, 1:].any()
    for now, then in zip(inputs["outs"], limited["outs"], strict=True):
        assert same_bits(now, then)
    assert same_bits(inputs["pool"][0], limited["pool"][0])
    assert not inputs["pool"][0].isnan().any()
    assert torch.equal(inputs["window"].length, limited["window"].length)
    others = [slot for slot in range(5) if slot not in slots.tolist()]
    for now, then in zip(inputs["window"].tensors(), untouched["window"].tensors(), strict=True):
        assert same_bits(now[others], then[others])
