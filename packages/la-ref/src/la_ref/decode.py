"""decode in plain torch.

Computes, for every row b with slot p = s_offsets[b] in [0, P) and head h of group g = h // (H // G),

    S'[v,k] = exp(-d[h]) * S[v,k] + v[b,h,v] * k[b,g,k]      S = s[p*H + h], replaced by S'
    o[b,h,v] = scale * sum_k S'[v,k] * q[b,g,k]

and zero for every other row. Pool [P*H, V, K] with K or V contiguous; states are worked on in the order of memory.

The batch is cut into chunks of rows (and of heads, when one row is larger than a chunk), a chunk into blocks of
(row, head) pairs (and of V, when one pair is larger than a block). A block's states are gathered from the pool,
updated, scattered back, multiplied by q and summed over K. Everything but that sum is elementwise, so a result depends
on nothing but its operands: a row gives the same bits in every batch and at every position. The sum is torch's where
its order is known to depend on K alone (along contiguous memory on a CPU), and a tree of elementwise additions
elsewhere; a matrix product would pick its order by the number of rows.

On a GPU nothing can be read back without a synchronisation, so padding rows cannot be left out of a chunk. They
repeat the chunk's first live row instead, and write the same bits to the same slot; there a chunk is one block, since
in another block that row's state would have been updated already. A chunk without a live row writes the own bits of
the batch's first live row's slot back; only a batch of nothing but padding does so to slot 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from la_core.spec.decode_problem import DecodeProblem
from la_ref import blocks
from la_ref.blocks import BLOCK_BYTES, MAX_PAIRS, full_chunks, in_wide_elements, live_chunks, sum_over

CHUNK_BYTES = 8 << 20
"""Float32 bytes of q, k, v and the output in one chunk, on a CPU. A GPU's chunk is one block."""


@torch.inference_mode()
def decode(
    problem: DecodeProblem,
    q: torch.Tensor,  # [B, G, K]
    k: torch.Tensor,  # [B, G, K]
    v: torch.Tensor,  # [B, H, V]
    s: torch.Tensor,  # [P*H, V, K]
    s_offsets: torch.Tensor,  # [B]
    decay_scales: torch.Tensor,  # [H] float32
    softmax_scale: float,
    out: torch.Tensor,  # [B, H, V]
) -> None:
    """Run one checked call; see the module for the method and :func:`la_core.decode` for the arguments.

    Runs in inference mode: a pool that was allocated in it can be written from outside of it all the same. Autograd's
    counters of versions do not see the writes.
    """
    if problem.P == 0:
        out.zero_()
        return
    slots = s_offsets.long()
    live = (slots >= 0) & (slots < problem.P)
    # exp in float64, rounded once: exact to half an ulp on every device.
    alpha = torch.exp(-decay_scales.double()).float()
    all_heads = torch.arange(problem.H, device=q.device)
    cut = _cut(problem)
    scratch = _scratch(problem, cut)
    chunks = live_chunks(live, cut.rows, out) if blocks.can_read_back(problem) else full_chunks(live, cut.rows)
    for target, source, mask in chunks:
        slot_rows = slots[source]
        if mask is not None:
            slot_rows = slot_rows.clamp(0, problem.P - 1)
        for h in range(0, problem.H, cut.heads):
            heads = all_heads[h : h + cut.heads]
            result = _decode_chunk(
                problem,
                cut,
                s,
                torch.add(heads, slot_rows[:, None], alpha=problem.H).flatten(),
                alpha[heads].repeat(slot_rows.shape[0]),
                _of_heads(q, source, heads, problem),
                _of_heads(k, source, heads, problem),
                v[:, h : h + cut.heads][source].float().flatten(0, 1),
                mask,
                scratch,
            )
            result = result.mul_(softmax_scale).view(-1, heads.shape[0], problem.V)
            if mask is not None:
                result = torch.where(mask[:, None, None], result, 0.0)
            out[:, h : h + cut.heads][target] = result.to(out.dtype)


def _decode_chunk(
    problem: DecodeProblem,
    cut: _Cut,
    s: torch.Tensor,  # [P*H, V, K]
    pool_rows: torch.Tensor,  # [n]
    alpha: torch.Tensor,  # [n]
    q: torch.Tensor,  # [n, K] float32
    k: torch.Tensor,  # [n, K] float32
    v: torch.Tensor,  # [n, V] float32
    mask: torch.Tensor | None,  # [rows]
    scratch: _Scratch,
) -> torch.Tensor:
    """Update the states of n (row, head) pairs in place; returns `S' @ q` [n, V] in float32."""
    result = torch.empty(q.shape[0], problem.V, dtype=torch.float32, device=q.device)
    blocks = list(zip(*(torch.split(t, cut.pairs) for t in (pool_rows, alpha, q, k, v, result)), strict=True))
    for start in range(0, problem.V, cut.v):
        some = slice(start, start + cut.v)
        k_dim = 2 if problem.state_layout == "vk" else 1
        # The states as the pool holds them, in the order of memory.
        states = s[:, some] if k_dim == 2 else s[:, some].transpose(1, 2)
        pool = in_wide_elements(states)
        in_place = scratch.updated is scratch.stored
        for block_rows, block_alpha, block_q, block_k, block_v, block_result in blocks:
            shape = torch.Size((block_q.shape[0], *states.shape[1:]))
            stored, updated = (flat[: shape.numel()].view(shape) for flat in scratch)
            in_pool = stored.view(pool.dtype)
            torch.index_select(pool, 0, block_rows, out=in_pool)
            if not in_place:
                updated.copy_(stored)
            outer = block_v[:, some].unsqueeze(k_dim), block_k.unsqueeze(3 - k_dim)
            updated.mul_(block_alpha[:, None, None]).addcmul_(*outer)
            if mask is not None:
                stored.copy_(torch.where(mask.any(), updated.to(s.dtype), stored))
            elif not in_place:
                stored.copy_(updated)
            pool.index_put_((block_rows,), in_pool)
            # Where both are float32 on a CPU, `updated` is `stored` itself: the pool has its values by now.
            sum_over(updated.mul_(block_q.unsqueeze(3 - k_dim)), k_dim, block_result[:, some])
    return result


def _of_heads(
    rows: torch.Tensor, source: slice | torch.Tensor, heads: torch.Tensor, problem: DecodeProblem
) -> torch.Tensor:
    """The rows `source` of q or k [B, G, K] as every head of `heads` sees them, in float32: [r * h, K]."""
    if problem.G == problem.H == heads.shape[0]:
        rows = rows[source]
    else:
        group = heads // (problem.H // problem.G)
        rows = rows[source, group] if isinstance(source, slice) else rows[source[:, None], group]
    return rows.float().flatten(0, 1)


class _Cut(NamedTuple):
    """How a batch is cut: a chunk is `rows` x `heads`, a block in it `pairs` (row, head) pairs x `v` values of V."""

    rows: int
    heads: int
    pairs: int
    v: int


def _cut(problem: DecodeProblem) -> _Cut:
    """Whole rows to a chunk if one fits, else whole heads; whole pairs to a block if one fits, else part of V."""
    elements = BLOCK_BYTES["cpu" if problem.device.type == "cpu" else "cuda"] // 4
    v = min(problem.V, max(1, elements // problem.K))
    # A pair's q, k, v and result count as well: where K or V is small, they are no smaller than its state.
    a_pair = v * problem.K + 2 * (problem.K + problem.V) + 8
    pairs = min(MAX_PAIRS, max(1, elements // a_pair)) if v == problem.V else 1
    in_chunk = pairs
    if blocks.can_read_back(problem):
        in_chunk = min(MAX_PAIRS, max(pairs, CHUNK_BYTES // (8 * (problem.K + problem.V))))
    heads = min(problem.H, in_chunk)
    rows = min(problem.B, max(1, in_chunk // heads)) if heads == problem.H else 1
    return _Cut(rows, heads, min(pairs, rows * heads), v)


class _Scratch(NamedTuple):
    """The buffers of a block, flat; one and the same where the pool's dtype is float32 and nothing is masked."""

    stored: torch.Tensor  # as the pool holds the states
    updated: torch.Tensor  # float32


def _scratch(problem: DecodeProblem, cut: _Cut) -> _Scratch:
    """Made once for all blocks, so that memory of this size is made ready for use once."""
    size = cut.pairs * cut.v * problem.K
    updated = torch.empty(size, dtype=torch.float32, device=problem.device)
    if problem.state_dtype == torch.float32 and blocks.can_read_back(problem):
        return _Scratch(updated, updated)
    return _Scratch(torch.empty(size, dtype=problem.state_dtype, device=problem.device), updated)
