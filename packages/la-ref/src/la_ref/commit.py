"""fold, commit and commit_layers, and the full window of decode, in plain torch.

For a row that brings in c tokens, with the positions of `window_tokens`,

    S'[v,k] = exp(-d*c) * S[v,k] + sum over positions i < c of exp(-d*(c-1-i)) * v_i[v] * k_i[k]

The sum goes position by position, oldest first, and is elementwise: a row gives the same bits in every batch. As in
`decode.py`, a GPU works on all rows, where those without anything to bring in repeat one that has, in the same block.
"""

from __future__ import annotations

import torch

from la_core.spec.kv_window import KVWindow
from la_core.spec.window_problem import WindowProblem
from la_ref.blocks import in_wide_elements
from la_ref.window_tokens import (
    Cursors,
    Tokens,
    cut,
    gather_tokens,
    pool_rows,
    powers_of_decay,
    read_cursors,
    row_chunks,
    weights,
)


@torch.inference_mode()
def commit(
    problem: WindowProblem,
    window: KVWindow,  # of one layer or stacked
    s: torch.Tensor,  # [P*H, V, K] or [L, P*H, V, K]
    s_offsets: torch.Tensor,  # [B]
    decay_scales: torch.Tensor,  # [H] or [L, H] float32
    accepted: torch.Tensor | int,  # [B]
    room: int | None,
) -> None:
    """Run one checked call; see the module for the method and :func:`la_core.commit` for the arguments."""
    if problem.P == 0:
        return
    cursors = read_cursors(problem, window, s_offsets)
    more = accepted.long() if isinstance(accepted, torch.Tensor) else torch.full_like(cursors.slots, accepted)
    counts = cursors.length + torch.minimum(more.clamp_min(0), problem.N - cursors.length)
    if room is not None:
        counts = torch.where(counts + room > problem.N, counts, 0)
    if window.k.ndim == 4:
        bring_in(problem, window, s, decay_scales, cursors, counts)
        return
    for layer in range(problem.L):
        bring_in(problem, window.layer(layer), s[layer], decay_scales[layer], cursors, counts)


def bring_in(
    problem: WindowProblem,
    window: KVWindow,  # of one layer
    s: torch.Tensor,  # [P*H, V, K]
    decay_scales: torch.Tensor,  # [H] float32
    cursors: Cursors,
    counts: torch.Tensor,  # [B]
    k: torch.Tensor | None = None,  # [B, 1, G, K]
    v: torch.Tensor | None = None,  # [B, 1, H, V]
) -> None:
    """Bring the first `counts` tokens of each live row into its state: those of the window, then one of `k` and `v`."""
    powers = powers_of_decay(problem, decay_scales)
    all_heads = torch.arange(problem.H, device=s.device)
    sizes = cut(problem)
    for _, source, mask in row_chunks(problem, cursors.live & (counts > 0), sizes.rows):
        count = counts[source]
        in_window = count.clamp_max(problem.N)
        for first in range(0, problem.H, sizes.heads):
            heads = all_heads[first : first + sizes.heads]
            tokens = gather_tokens(problem, window, cursors, source, heads, in_window, k, v, count - in_window)
            rows_of_s = pool_rows(problem, cursors.slots[source], heads)
            _update(problem, s, rows_of_s, tokens, count, powers, heads, mask, sizes.v)


def _update(
    problem: WindowProblem,
    s: torch.Tensor,  # [P*H, V, K]
    rows_of_s: torch.Tensor,  # [r * h]
    tokens: Tokens,
    count: torch.Tensor,  # [r]
    powers: torch.Tensor,  # [H, N + T + 1]
    heads: torch.Tensor,  # [h]
    mask: torch.Tensor | None,  # [r] bool
    v_size: int,
) -> None:
    v_dim = 1 if problem.state_layout == "vk" else 2
    k_dim = 3 - v_dim
    in_memory = s if v_dim == 1 else s.transpose(1, 2)
    decay = weights(powers, heads, count[:, None]).flatten()
    # A token that is not valid is zero already, and stays it: its exponent is taken as 0.
    decayed = tokens.v * weights(powers, heads, count[:, None] - 1 - tokens.position)[..., None]
    for start in range(0, problem.V, v_size):
        size = min(v_size, problem.V - start)
        pool = in_wide_elements(in_memory.narrow(v_dim, start, size))
        wide = pool.index_select(0, rows_of_s)
        stored = wide.view(s.dtype)
        states = stored.float() * decay[:, None, None]
        for i in range(tokens.k.shape[1]):
            values = decayed[:, i, :, start : start + size].flatten(0, 1)
            states.addcmul_(values.unsqueeze(k_dim), tokens.k[:, i].flatten(0, 1).unsqueeze(v_dim))
        updated = states.to(s.dtype)
        stored.copy_(updated if mask is None else torch.where(mask.any(), updated, stored))
        pool.index_put_((rows_of_s,), wide)
