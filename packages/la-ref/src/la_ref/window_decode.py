"""decode with a window in plain torch: verify of one draft, and a commit of the rows whose window is full."""

from __future__ import annotations

import torch

from la_core.spec.kv_window import KVWindow
from la_core.spec.window_problem import WindowProblem
from la_ref.commit import bring_in
from la_ref.verify import write_outputs, write_tokens
from la_ref.window_tokens import read_cursors


@torch.inference_mode()
def decode_window(
    problem: WindowProblem,
    q: torch.Tensor,  # [B, G, K]
    k: torch.Tensor,  # [B, G, K]
    v: torch.Tensor,  # [B, H, V]
    s: torch.Tensor,  # [P*H, V, K]
    s_offsets: torch.Tensor,  # [B]
    decay_scales: torch.Tensor,  # [H] float32
    window: KVWindow,
    softmax_scale: float,
    out: torch.Tensor,  # [B, H, V]
) -> None:
    """Run one checked call; see :func:`la_core.decode` for the arguments."""
    if problem.P == 0:
        out.zero_()
        return
    cursors = read_cursors(problem, window, s_offsets)
    q, k, v, out = (t.unsqueeze(1) for t in (q, k, v, out))
    one = torch.ones_like(cursors.slots)
    full = cursors.length == problem.N
    write_outputs(problem, q, k, v, s, decay_scales, window, cursors, one, softmax_scale, out, None)
    write_tokens(problem, k, v, window, cursors, torch.where(full, 0, one))
    bring_in(problem, window, s, decay_scales, cursors, torch.where(full, problem.N + 1, 0), k, v)
