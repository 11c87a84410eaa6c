"""The truth: decode in float64, as a plain loop over rows and heads. Everything is judged by it, la-ref included."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class DecodeTruth:
    """What a call must produce, in float64 on the CPU.

    Attributes
    ----------
    out
        [B, H, V], zero in padding rows.
    out_magnitude
        [B, H, V]: `|scale| * sum_k |S'[v,k]| |q[k]|`, what rounding errors of the output scale with.
    states
        For each live row its new states [H, V, K].
    state_magnitude
        Like `states`: `exp(-d) |S| + |v| |k|`, what rounding errors of the states scale with.
    """

    out: torch.Tensor
    out_magnitude: torch.Tensor
    states: dict[int, torch.Tensor]
    state_magnitude: dict[int, torch.Tensor]


def decode_truth(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    s: torch.Tensor,
    s_offsets: torch.Tensor,
    decay_scales: torch.Tensor,
    softmax_scale: float | None = None,
) -> DecodeTruth:
    """The truth of a legal call; arguments as in :func:`la_core.decode`, none of them is written.

    Rows with an offset outside of `[0, P)` are padding. Two rows with one slot are not accounted for.
    """
    B, G, K = q.shape
    H, V = v.shape[1:]
    slots = s.shape[0] // H
    scale = K**-0.5 if softmax_scale is None else softmax_scale
    q, k, v = (t.detach().cpu().double() for t in (q, k, v))
    decays = torch.exp(-decay_scales.detach().cpu().double())
    out = torch.zeros(B, H, V, dtype=torch.float64)
    out_magnitude = torch.zeros_like(out)
    states: dict[int, torch.Tensor] = {}
    state_magnitude: dict[int, torch.Tensor] = {}
    for b, slot in enumerate(s_offsets.tolist()):
        if not 0 <= slot < slots:
            continue
        old = s[slot * H : (slot + 1) * H].detach().cpu().double()
        states[b] = torch.empty(H, V, K, dtype=torch.float64)
        state_magnitude[b] = torch.empty_like(states[b])
        for h in range(H):
            g = h // (H // G)
            states[b][h] = decays[h] * old[h] + torch.outer(v[b, h], k[b, g])
            state_magnitude[b][h] = decays[h] * old[h].abs() + torch.outer(v[b, h].abs(), k[b, g].abs())
            out[b, h] = scale * (states[b][h] @ q[b, g])
            out_magnitude[b, h] = abs(scale) * (state_magnitude[b][h] @ q[b, g].abs())
    return DecodeTruth(out, out_magnitude, states, state_magnitude)
