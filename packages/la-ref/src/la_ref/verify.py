"""verify, and the outputs of decode with a window, in plain torch.

For a row with n pending tokens and m drafts, t < m, with the positions of `window_tokens`,

    o[t,v] = scale * ( exp(-d*(n+t+1)) * sum_k S[v,k] q[t,k]
                       + sum over positions i <= n+t of exp(-d*(n+t-i)) * (k_i . q_t) * v_i[v] )

Rows are worked on in blocks of (row, head) pairs. All but the sums is elementwise, and the sums have an order that
depends on K, N and t alone, so a row gives the same bits in every batch; see `decode.py`.
"""

from __future__ import annotations

import torch

from la_core.spec.kv_window import KVWindow
from la_core.spec.window_problem import WindowProblem
from la_ref import blocks
from la_ref.blocks import sum_over
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
def verify(
    problem: WindowProblem,
    q: torch.Tensor,  # [B, T, G, K]
    k: torch.Tensor,  # [B, T, G, K]
    v: torch.Tensor,  # [B, T, H, V]
    s: torch.Tensor,  # [P*H, V, K]
    s_offsets: torch.Tensor,  # [B]
    decay_scales: torch.Tensor,  # [H] float32
    window: KVWindow,
    draft_lengths: torch.Tensor | None,  # [B]
    softmax_scale: float,
    out: torch.Tensor,  # [B, T, H, V]
) -> None:
    """Run one checked call; see the module for the method and :func:`la_core.verify` for the arguments."""
    if problem.P == 0:
        out.zero_()
        return
    cursors = read_cursors(problem, window, s_offsets)
    if draft_lengths is None:
        drafts = torch.full_like(cursors.slots, problem.T)
    else:
        drafts = draft_lengths.long().clamp(0, problem.T)
    fits = cursors.length + drafts <= problem.N
    write_outputs(problem, q, k, v, s, decay_scales, window, cursors, drafts, softmax_scale, out, fits)
    write_tokens(problem, k, v, window, cursors, torch.where(fits, drafts, 0))


def write_outputs(
    problem: WindowProblem,
    q: torch.Tensor,  # [B, T, G, K]
    k: torch.Tensor,  # [B, T, G, K]
    v: torch.Tensor,  # [B, T, H, V]
    s: torch.Tensor,  # [P*H, V, K]
    decay_scales: torch.Tensor,  # [H] float32
    window: KVWindow,
    cursors: Cursors,
    drafts: torch.Tensor,  # [B]
    softmax_scale: float,
    out: torch.Tensor,  # [B, T, H, V]
    fits: torch.Tensor | None,  # [B] bool
) -> None:
    """All outputs: zero behind a row's drafts, NaN for drafts that do not fit. Reads states and windows only."""
    powers = powers_of_decay(problem, decay_scales)
    all_heads = torch.arange(problem.H, device=s.device)
    steps = torch.arange(problem.T, device=s.device)
    sizes = cut(problem)
    for target, source, mask in row_chunks(problem, cursors.live, sizes.rows, out):
        length, some_drafts = cursors.length[source], drafts[source]
        shown = (steps < some_drafts[:, None])[:, :, None, None]
        for first in range(0, problem.H, sizes.heads):
            heads = all_heads[first : first + sizes.heads]
            group = heads // (problem.H // problem.G)
            tokens = gather_tokens(problem, window, cursors, source, heads, length, k, v, some_drafts)
            result = _outputs(
                problem,
                s,
                pool_rows(problem, cursors.slots[source], heads),
                torch.where(shown, q[source][:, :, group].float(), 0.0),
                tokens,
                length,
                powers,
                heads,
                sizes.v,
            )
            result.mul_(softmax_scale)
            if fits is not None:
                result = torch.where(fits[source][:, None, None, None], result, float("nan"))
            result = torch.where(shown, result, 0.0)
            if mask is not None:
                result = torch.where(mask[:, None, None, None], result, 0.0)
            out[:, :, first : first + sizes.heads][target] = result.to(out.dtype)


def _outputs(
    problem: WindowProblem,
    s: torch.Tensor,  # [P*H, V, K]
    rows_of_s: torch.Tensor,  # [r * h]
    q: torch.Tensor,  # [r, T, h, K] float32
    tokens: Tokens,
    length: torch.Tensor,  # [r]
    powers: torch.Tensor,  # [H, N + T + 1]
    heads: torch.Tensor,  # [h]
    v_size: int,
) -> torch.Tensor:
    """Outputs before the scale: [r, T, h, V] float32."""
    r, T, h, _ = q.shape
    result = torch.empty(r, T, h, problem.V, dtype=torch.float32, device=q.device)
    from_state = torch.empty(r * h, problem.V, dtype=torch.float32, device=q.device)
    k_dim = 2 if problem.state_layout == "vk" else 1
    in_memory = s if k_dim == 2 else s.transpose(1, 2)
    v_dim = 3 - k_dim
    for start in range(0, problem.V, v_size):
        some = slice(start, start + v_size)
        states = in_memory.narrow(v_dim, start, min(v_size, problem.V - start)).index_select(0, rows_of_s).float()
        products = torch.empty_like(states)
        for t in range(T):
            torch.mul(states, q[:, t].reshape(r * h, -1).unsqueeze(v_dim), out=products)
            sum_over(products, k_dim, from_state[:, some])
            result[:, t, :, some] = from_state[:, some].view(r, h, -1)
    for t in range(T):
        # Positions that output t may see: later drafts are not even multiplied by zero, since they may be NaN.
        seen = problem.N + t + 1
        now = length + t
        scores = torch.empty(r, seen, h, dtype=torch.float32, device=q.device)
        in_order = torch.empty(r, seen, h, problem.K, dtype=torch.float32, device=q.device)
        sum_over(torch.mul(tokens.k[:, :seen], q[:, t : t + 1], out=in_order), 3, scores)
        scores.mul_(weights(powers, heads, now[:, None] - tokens.position[:, :seen]))
        scores = torch.where(tokens.valid[:, :seen, None], scores, 0.0)
        from_tokens = torch.empty(r, h, problem.V, dtype=torch.float32, device=q.device)
        sum_over(scores[..., None] * tokens.v[:, :seen], 1, from_tokens)
        result[:, t].mul_(weights(powers, heads, now[:, None] + 1).squeeze(1)[..., None]).add_(from_tokens)
    return result


def write_tokens(
    problem: WindowProblem,
    k: torch.Tensor,  # [B, T, G, K]
    v: torch.Tensor,  # [B, T, H, V]
    window: KVWindow,
    cursors: Cursors,
    drafts: torch.Tensor,  # [B]
) -> None:
    """Write the first `drafts` tokens of each live row behind its pending ones."""
    steps = torch.arange(problem.T, device=k.device)
    for _, source, mask in row_chunks(problem, cursors.live & (drafts > 0), cut(problem).rows):
        places = cursors.places(source, cursors.length[source][:, None] + steps, problem.N)
        slots = cursors.slots[source][:, None].expand_as(places)
        written = steps < drafts[source][:, None]
        if blocks.can_read_back(problem):
            row, t = written.nonzero().unbind(1)
            for new, kept in ((k, window.k), (v, window.v)):
                kept[slots[row, t], places[row, t]] = new[source][row, t].to(kept.dtype)
        elif mask is not None:
            written &= mask.any()
            for new, kept in ((k, window.k), (v, window.v)):
                # Where nothing is due, a place gets its own bits back.
                due = torch.where(written[:, :, None, None], new[source].to(kept.dtype), kept[slots, places])
                kept[slots, places] = due
