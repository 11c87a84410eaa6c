"""decode in plain torch.

Computes, for every row b with slot p = s_offsets[b] in [0, P) and head h of group g = h // (H // G),

    S'[v,k] = exp(-d[h]) * S[v,k] + v[b,h,v] * k[b,g,k]      S = s[p*H + h], replaced by S'
    o[b,h,v] = scale * sum_k S'[v,k] * q[b,g,k]

and zero for every other row. Pool [P*H, V, K] with K or V contiguous; states are worked on in the order of memory.

The batch is cut into blocks of rows (and of heads and V, when one row is larger than a block). A block's states are
gathered from the pool, updated, scattered back, multiplied by q and summed over K. Everything but that sum is
elementwise, so a result depends on nothing but its operands: a row gives the same bits in every batch and at every
position. The sum is torch's where its order is known to depend on K alone (along contiguous memory on a CPU), and a
tree of elementwise additions elsewhere; a matrix product would pick its order by the number of rows.

On a GPU nothing can be read back without a synchronisation, so padding rows cannot be left out of a block. They
repeat the block's first live row instead, and write the same bits to the same slot. A block without a live row
writes the own bits of the batch's first live row's slot back; only a batch of nothing but padding does so to slot 0.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from la_core.spec.decode_problem import DecodeProblem

BLOCK_BYTES = {"cpu": 8 << 20, "cuda": 12 << 20}
"""Float32 bytes of the states in one block. CPU: a block stays in cache between its passes, and fewer, larger blocks
cost fewer calls; `la-bench ref --blocks` measures it. GPU: at most five such buffers live at once, within 64 MiB."""

MAX_TORCH_SUM = 16384
"""Longest sum left to torch: beyond 32768 it splits the sum of a single output among threads."""

MAX_BLOCK_PAIRS = 1 << 17
"""Most (row, head) pairs in a block, so that their indices stay small beside states of few elements."""


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

    Runs in inference mode: a pool that was allocated in it can be written from outside of it all the same.
    """
    if problem.P == 0:
        out.zero_()
        return
    slots = s_offsets.long()
    live = (slots >= 0) & (slots < problem.P)
    # exp in float64, rounded once: exact to half an ulp on every device.
    alpha = torch.exp(-decay_scales.double()).float()[:, None, None]  # [H, 1, 1]
    all_heads = torch.arange(problem.H, device=q.device)
    rows_per_block, heads_per_block, v_per_block = _block_sizes(problem)
    # One buffer for all blocks: fresh memory of this size costs more in page faults than the copy into it.
    scratch = torch.empty(rows_per_block * heads_per_block * v_per_block * problem.K, dtype=s.dtype, device=s.device)

    if problem.device.type == "cpu":
        blocks = _live_blocks(live, rows_per_block, out)
    else:
        blocks = _full_blocks(live, rows_per_block)
    for target, source, mask in blocks:
        q_rows, k_rows, v_rows, slot_rows = q[source], k[source], v[source], slots[source]
        if mask is not None:
            slot_rows = slot_rows.clamp(0, problem.P - 1)
        for h in range(0, problem.H, heads_per_block):
            heads = all_heads[h : h + heads_per_block]
            pool_rows = torch.add(heads, slot_rows[:, None], alpha=problem.H).flatten()
            q_heads, k_heads = (_of_heads(t, heads, problem) for t in (q_rows, k_rows))
            v_heads = v_rows[:, h : h + heads_per_block].float()
            alpha_heads = alpha[h : h + heads_per_block]
            for start in range(0, problem.V, v_per_block):
                some = slice(start, start + v_per_block)
                result = _step(
                    problem, s[:, some], pool_rows, alpha_heads, q_heads, k_heads, v_heads[:, :, some], mask, scratch
                ).mul_(softmax_scale)
                if mask is not None:
                    result = torch.where(mask[:, None, None], result, 0.0)
                out[:, h : h + heads_per_block, some][target] = result.to(out.dtype)


def _step(
    problem: DecodeProblem,
    s: torch.Tensor,  # [P*H, v, K]
    pool_rows: torch.Tensor,  # [r*h]
    alpha: torch.Tensor,  # [h, 1, 1]
    q: torch.Tensor,  # [r, h, K] float32
    k: torch.Tensor,  # [r, h, K] float32
    v: torch.Tensor,  # [r, h, v] float32
    mask: torch.Tensor | None,  # [r]
    scratch: torch.Tensor,  # [>= r*h*v*K], dtype of s
) -> torch.Tensor:
    """Update the states of r rows and h heads in place; returns `S' @ q` [r, h, v] in float32."""
    r, h = q.shape[:2]
    if problem.state_layout == "vk":
        k_dim = 3
        q, k, v = q[:, :, None, :], k[:, :, None, :], v[:, :, :, None]
    else:
        s, k_dim = s.transpose(1, 2), 2
        q, k, v = q[:, :, :, None], k[:, :, :, None], v[:, :, None, :]
    # The states as the pool holds them, in the order of memory.
    stored = scratch[: r * h * s.shape[1] * s.shape[2]].view(r * h, *s.shape[1:])
    torch.index_select(s, 0, pool_rows, out=stored)
    state = stored.view(r, h, *s.shape[1:])
    updated = state.float() if mask is None else state.to(torch.float32, copy=True)
    updated.mul_(alpha).addcmul_(v, k)
    if mask is not None:
        state.copy_(torch.where(mask.any(), updated.to(s.dtype), state))
    elif updated is not state:
        state.copy_(updated)
    _scatter(s, pool_rows, stored)
    # Where state and arithmetic are both float32, `updated` is `stored` itself: the pool has its values by now.
    return _sum_over_k(updated.mul_(q), k_dim)


def _sum_over_k(products: torch.Tensor, dim: int) -> torch.Tensor:
    """Sum over `dim` in an order that depends on its size alone; may overwrite `products`."""
    size = products.shape[dim]
    if dim == products.ndim - 1 and size <= MAX_TORCH_SUM and products.device.type == "cpu":
        return products.sum(dim)
    while size > 1:
        kept = (size + 1) // 2
        products.narrow(dim, 0, size - kept).add_(products.narrow(dim, kept, size - kept))
        size = kept
    return products.select(dim, 0)


def _scatter(s: torch.Tensor, pool_rows: torch.Tensor, states: torch.Tensor) -> None:
    """`s[pool_rows] = states`, bit for bit."""
    if s.device.type == "cpu":
        # torch copies element by element here, so elements of 16 bytes take a third of the time of 4 (same bits).
        wide = torch.complex128
        per_wide = wide.itemsize // s.element_size()
        sizes = (s.storage_offset(), *s.stride()[:-1], s.shape[-1])
        if s.stride(-1) == 1 and s.data_ptr() % wide.itemsize == 0 and not any(n % per_wide for n in sizes):
            s, states = s.view(wide), states.view(wide)
    s.index_put_((pool_rows,), states)


def _of_heads(rows: torch.Tensor, heads: torch.Tensor, problem: DecodeProblem) -> torch.Tensor:
    """float32 q or k [r, G, K] as every head of `heads` sees it: [r, h, K]."""
    if problem.G == problem.H == heads.shape[0]:
        return rows.float()
    return rows[:, heads // (problem.H // problem.G)].float()


def _block_sizes(problem: DecodeProblem) -> tuple[int, int, int]:
    """Rows, heads and values of V in one block: whole rows if one fits, else whole heads, else part of V."""
    elements = BLOCK_BYTES["cpu" if problem.device.type == "cpu" else "cuda"] // 4
    v_size = min(problem.V, max(1, elements // problem.K))
    pairs = min(MAX_BLOCK_PAIRS, max(1, elements // (v_size * problem.K))) if v_size == problem.V else 1
    heads = min(problem.H, pairs)
    rows = min(problem.B, max(1, pairs // heads)) if heads == problem.H else 1
    return rows, heads, v_size


_Block = tuple[slice | torch.Tensor, slice | torch.Tensor, torch.Tensor | None]
"""Rows of `out` to write, rows of the inputs to read, and which of them are live (None: all)."""


def _live_blocks(live: torch.Tensor, size: int, out: torch.Tensor) -> Iterator[_Block]:
    """CPU: blocks of live rows only; clears the output of the others."""
    if bool(live.all()):
        for start in range(0, live.shape[0], size):
            rows = slice(start, start + size)
            yield rows, rows, None
        return
    out[~live] = 0
    for some in torch.split(live.nonzero().squeeze(1), size):
        yield some, some, None


def _full_blocks(live: torch.Tensor, size: int) -> Iterator[_Block]:
    """GPU: blocks of all rows; in each, padding rows read what its first live row reads, or the batch's."""
    first = live.int().argmax()
    for start in range(0, live.shape[0], size):
        mask = live[start : start + size]
        here = torch.arange(start, start + mask.shape[0], device=live.device)
        stand_in = torch.where(mask.any(), start + mask.int().argmax(), first)
        yield slice(start, start + size), torch.where(mask, here, stand_in), mask
