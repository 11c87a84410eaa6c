"""Checks of the values of offsets, cursors and counts: on a CPU always, on a GPU on request."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from la_core.ops.decode_values import ENV_CHECK_OFFSETS, may_read_back
from la_core.ops.window_plan import WindowPlan
from la_core.spec.argument_checks import violation
from la_core.spec.kv_window import KVWindow
from la_core.spec.state_pool_rules import check_offset_values
from la_core.spec.window_problem import WindowProblem

Counts = torch.Tensor | int | None
"""`draft_lengths` or `accepted`: one for each row, one for all, or none to check."""


def check_window_values(
    op: str,
    problem: WindowProblem,
    window: KVWindow,
    s_offsets: torch.Tensor,
    counts: Counts,
    check_offsets: bool | None,
    plan: WindowPlan | None = None,
) -> None:
    """Refuse values that a kernel would have to limit, where they can be read.

    Parameters
    ----------
    counts
        `draft_lengths` of verify (T for every row if None), `accepted` of commit and advance, None for the others.
    plan
        Remembers offsets that passed.
    """
    if problem.device.type == "cuda":
        wanted = check_offsets or (ENV_CHECK_OFFSETS and check_offsets is None)
        if not wanted or not may_read_back(op, s_offsets.device, explicit=bool(check_offsets)):
            return
    elif problem.device.type != "cpu":
        return
    offsets = s_offsets.tolist()
    if plan is None or plan.checked_offsets != offsets:
        check_offset_values(op, offsets, problem.P)
        if plan is not None:
            plan.checked_offsets = offsets
    if op == "clear" or max(offsets, default=-1) < 0:
        # clear limits cursors itself: it must be able to repair them.
        return
    slots = s_offsets if min(offsets) >= 0 else s_offsets.clamp_min(0)
    # Not `start[slots]`, which takes four times as long.
    starts, lengths = window.start.index_select(0, slots).tolist(), window.length.index_select(0, slots).tolist()
    per_row = None
    if op == "verify":
        per_row = [problem.T] * len(offsets) if counts is None else _per_row(counts, len(offsets))
    elif counts is not None:
        per_row = _per_row(counts, len(offsets))
    if _surely_good(op, problem, starts, lengths, per_row):
        return
    rows = [row for row, slot in enumerate(offsets) if slot >= 0]
    for name, cursors, most, limit in (
        ("window.start", starts, problem.N - 1, "N - 1"),
        ("window.length", lengths, problem.N, "N"),
    ):
        for row in rows:
            if not 0 <= cursors[row] <= most:
                raise violation(
                    op,
                    f"{name} must be from 0 to {limit} = {most}",
                    f"{cursors[row]} in slot {offsets[row]} of row {row}",
                    "Only advance and clear write cursors; those of a new window are zero.",
                )
    if op == "verify":
        assert per_row is not None
        _check_drafts(op, problem, rows, offsets, lengths, per_row)
    elif per_row is not None:
        _check_accepted(op, problem, rows, lengths, per_row)


def _surely_good(
    op: str, problem: WindowProblem, starts: Sequence[int], lengths: Sequence[int], counts: Sequence[int] | None
) -> bool:
    """True if the extremes of all rows, padding included, break no rule; if they do, the rows are judged one by one."""
    longest = max(lengths)
    if not (min(starts) >= 0 and max(starts) < problem.N and min(lengths) >= 0 and longest <= problem.N):
        return False
    if counts is None:
        return True
    most = problem.T if op == "verify" else problem.N
    return min(counts) >= 0 and max(counts) <= most and longest + max(counts) <= problem.N


def _per_row(counts: torch.Tensor | int, rows: int) -> list[int]:
    return [counts] * rows if isinstance(counts, int) else counts.tolist()


def _check_drafts(
    op: str,
    problem: WindowProblem,
    rows: Sequence[int],
    offsets: Sequence[int],
    lengths: Sequence[int],
    drafts: Sequence[int],
) -> None:
    for row in rows:
        if not 0 <= drafts[row] <= problem.T:
            raise violation(
                op,
                f"draft_lengths must be from 0 to T = {problem.T}",
                f"{drafts[row]} in row {row}",
                "Pass the number of drafts of each row.",
            )
        if lengths[row] + drafts[row] > problem.N:
            raise violation(
                op,
                f"pending tokens and drafts of a row must fit the N = {problem.N} places of the window",
                f"{lengths[row]} pending tokens and {drafts[row]} drafts in row {row}, slot {offsets[row]}",
                "Make room before: fold(..., room=T), then clear(..., room=T).",
            )


def _check_accepted(
    op: str, problem: WindowProblem, rows: Sequence[int], lengths: Sequence[int], accepted: Sequence[int]
) -> None:
    for row in rows:
        free = problem.N - lengths[row]
        # A decode that found the window full has put its token into the state: there advance may count it.
        most = 1 if op == "advance" and free == 0 else free
        if not 0 <= accepted[row] <= most:
            raise violation(
                op,
                "accepted must be from 0 to the number of places behind the pending tokens",
                f"{accepted[row]} in row {row}, with {lengths[row]} of N = {problem.N} places pending",
                "Pass at most the drafts that verify wrote.",
            )
