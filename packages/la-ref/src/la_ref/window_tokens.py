"""The tokens of a window in plain torch, as verify, decode with a window and commit need them.

Position i of a slot is the place (start + i) % N. Positions below `length` are pending, drafts come behind them. A
token at position i that is seen from position j >= i has decayed by exp(-d * (j - i)), the state by exp(-d * (j + 1)).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from la_core.spec.kv_window import KVWindow
from la_core.spec.window_problem import WindowProblem
from la_ref import blocks
from la_ref.blocks import BLOCK_BYTES, MAX_PAIRS, Chunk, full_chunks, live_chunks


class Cursors(NamedTuple):
    """What a batch's rows find in the pool. A padding row has a slot of another one, which must not be used.

    Attributes
    ----------
    slots
        Row -> slot, within the pool.
    live
        Rows that are not padding.
    start, length
        Cursors of the rows' slots, limited to the window: values on a GPU are unchecked.
    """

    slots: torch.Tensor  # [B] int64
    live: torch.Tensor  # [B] bool
    start: torch.Tensor  # [B] int64
    length: torch.Tensor  # [B] int64

    def places(self, rows: slice | torch.Tensor, positions: torch.Tensor, N: int) -> torch.Tensor:
        """Places of the `positions` [T] or [rows, T] of some rows: [rows, T]."""
        return (self.start[rows][:, None] + positions) % N


def read_cursors(problem: WindowProblem, window: KVWindow, s_offsets: torch.Tensor) -> Cursors:
    """The cursors of a batch; the pool must not be empty."""
    offsets = s_offsets.long()
    live = (offsets >= 0) & (offsets < problem.P)
    slots = offsets.clamp(0, problem.P - 1)
    start = window.start[slots].long() % problem.N
    return Cursors(slots, live, start, window.length[slots].long().clamp(0, problem.N))


def row_chunks(
    problem: WindowProblem, live: torch.Tensor, size: int, out: torch.Tensor | None = None
) -> Iterator[Chunk]:
    """Chunks of the `live` rows: exactly those on a CPU, all rows with a mask on a GPU."""
    return live_chunks(live, size, out) if blocks.can_read_back(problem) else full_chunks(live, size)


def powers_of_decay(problem: WindowProblem, decay_scales: torch.Tensor) -> torch.Tensor:
    """exp(-d * j) for j from 0 to N + T, in float64 and rounded once: [H, N + T + 1]."""
    steps = torch.arange(problem.N + problem.T + 1, device=decay_scales.device)
    return torch.exp(-decay_scales.double()[:, None] * steps).float()


class Cut(NamedTuple):
    """How a batch is cut into blocks: `rows` x `heads`, and `v` values of V at a time."""

    rows: int
    heads: int
    v: int


def cut(problem: WindowProblem) -> Cut:
    """Whole rows to a block if one fits, else some heads of one; part of V where a single pair does not fit."""
    elements = BLOCK_BYTES["cpu" if problem.device.type == "cpu" else "cuda"] // 4
    tokens = problem.N + problem.T
    v = min(problem.V, max(1, elements // (2 * problem.K)))
    a_pair = 2 * v * problem.K + 4 * tokens * (problem.K + problem.V) + 8
    pairs = min(MAX_PAIRS, max(1, elements // a_pair))
    heads = min(problem.H, pairs)
    return Cut(min(problem.B, max(1, pairs // heads)) if heads == problem.H else 1, heads, v)


class Tokens(NamedTuple):
    """Tokens of `r` rows and `h` heads: the N places of the window in order of position, then new ones.

    What is not `valid` is zero, whatever memory holds there.
    """

    k: torch.Tensor  # [r, X, h, K] float32
    v: torch.Tensor  # [r, X, h, V] float32
    position: torch.Tensor  # [r, X]
    valid: torch.Tensor  # [r, X] bool


def gather_tokens(
    problem: WindowProblem,
    window: KVWindow,  # of one layer
    cursors: Cursors,
    rows: slice | torch.Tensor,
    heads: torch.Tensor,  # [h]
    in_window: torch.Tensor,  # [r]
    k: torch.Tensor | None = None,  # [B, T, G, K]
    v: torch.Tensor | None = None,  # [B, T, H, V]
    drafts: torch.Tensor | None = None,  # [r]
) -> Tokens:
    """The first `in_window` positions of some rows, and behind them the first `drafts` of `k` and `v`."""
    group = heads // (problem.H // problem.G)
    steps = torch.arange(problem.N, device=heads.device)
    slot = cursors.slots[rows][:, None, None]
    place = cursors.places(rows, steps, problem.N)[:, :, None]
    window_k, window_v = window.k[slot, place, group], window.v[slot, place, heads]
    position = steps.expand(place.shape[0], -1)
    valid = position < in_window[:, None]
    if k is None or v is None or drafts is None:
        keys, values = window_k.float(), window_v.float()
    else:
        keys = torch.cat((window_k.float(), k[rows][:, :, group].float()), 1)
        values = torch.cat((window_v.float(), v[rows][:, :, heads].float()), 1)
        new = torch.arange(problem.T, device=heads.device)
        position = torch.cat((position, in_window[:, None] + new), 1)
        valid = torch.cat((valid, new < drafts[:, None]), 1)
    shown = valid[:, :, None, None]
    return Tokens(torch.where(shown, keys, 0.0), torch.where(shown, values, 0.0), position, valid)


def weights(powers: torch.Tensor, heads: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """exp(-d[h] * exponent) for exponents [r, X]: [r, X, h]. What is negative belongs to no valid token."""
    return powers[heads].t()[exponents.clamp_min(0)]


def pool_rows(problem: WindowProblem, slots: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
    """Rows of `s` of each slot and head: [r * h]."""
    return torch.add(heads, slots[:, None], alpha=problem.H).flatten()
