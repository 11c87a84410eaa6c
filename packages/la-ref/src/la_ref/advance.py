"""advance and clear in plain torch: the cursors of a window."""

from __future__ import annotations

import torch

from la_core.spec.kv_window import KVWindow
from la_core.spec.window_problem import WindowProblem
from la_ref.window_tokens import read_cursors, row_chunks


@torch.inference_mode()
def advance(
    problem: WindowProblem,
    window: KVWindow,
    s_offsets: torch.Tensor,  # [B]
    accepted: torch.Tensor | int,  # [B]
    room: int | None,
    clear: bool,
) -> None:
    """Run one checked call; see :func:`la_core.advance` and :func:`la_core.clear` for the arguments."""
    if problem.P == 0:
        return
    cursors = read_cursors(problem, window, s_offsets)
    start, length = cursors.start, cursors.length
    written = cursors.live
    if clear:
        start, length = (start + length) % problem.N, torch.zeros_like(length)
        if room is not None:
            written = written & (cursors.length + room > problem.N)
    else:
        more = accepted.long() if isinstance(accepted, torch.Tensor) else torch.full_like(length, accepted)
        # Into a full window `decode` took no token: there an accepted one says that it has been emptied.
        folded = (length == problem.N) & (more > 0)
        end = length + torch.minimum(more.clamp_min(0), problem.N - length)
        length = torch.where(folded, 0, end)
        if room is not None:
            committed = end + room > problem.N
            start = torch.where(committed, (start + end) % problem.N, start)
            length = torch.where(committed, 0, length)
    for _, source, mask in row_chunks(problem, written, problem.B):
        slots = cursors.slots[source]
        for cursor, new in ((window.start, start), (window.length, length)):
            due = new[source].int()
            # Without any row to write, a slot gets its own bits back.
            cursor[slots] = due if mask is None else torch.where(mask.any(), due, cursor[slots])
