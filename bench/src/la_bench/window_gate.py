"""The gate of calls with a window: some rows of a call are judged against float64, and all memory bit by bit.

The judge is that of `la_core.conformance`. It is given a few of the rows; what the others may write is taken as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from la_bench.accuracy import Verdict
from la_core.conformance.window_inputs import WindowInputs
from la_core.conformance.window_judge import untouched_errors, window_out_errors, window_state_errors
from la_core.conformance.window_truth import TrueValue, WindowTruth

CURSOR_OPS = ("advance", "clear")
"""All of their rows are judged: a cursor is one number."""

Run = Callable[[WindowInputs], torch.Tensor | None]


@dataclass(frozen=True)
class JudgedAction:
    """A call of an operator, those of its rows that are judged, and their truth."""

    full: WindowInputs
    part: WindowInputs
    rows: Sequence[int]
    truth: WindowTruth


def judged_action(full: WindowInputs, rows: Sequence[int], buffers: dict[str, torch.Tensor]) -> JudgedAction:
    """`buffers` holds the memory of states and window, from where their storage begins."""
    rows = range(full.case.B) if full.case.op in CURSOR_OPS else rows
    index = torch.tensor(list(rows), device=full.s.device)
    read = {"q": full.q, "k": full.k, "v": full.v, "s_offsets": full.s_offsets, "decay_scales": full.decay_scales}
    if full.counts is not None:
        read["accepted"] = torch.as_tensor(full.counts)
    cursors = {"start": full.window.start, "length": full.window.length}
    part = replace(
        full,
        case=replace(full.case, B=len(rows)),
        q=full.q[index],
        k=full.k[index],
        v=full.v[index],
        s_offsets=full.s_offsets[index],
        counts=full.counts[index] if isinstance(full.counts, torch.Tensor) else full.counts,
        out=None,
        buffers={**buffers, **read, **cursors},
    )
    return JudgedAction(full, part, rows, part.truth())


def judge_actions(actions: Sequence[Callable[[], JudgedAction]], run: Run) -> Verdict:
    """Make the calls one after the other and say everything that is wrong; what they changed is put back.

    The memory is that of the first call: all of them work on the same.
    """
    first = actions[0]()
    original = {name: buffer.clone() for name, buffer in first.part.buffers.items()}
    faults: list[str] = []
    out_error: float | None = None
    state_error = 0.0
    try:
        for number, make in enumerate(actions):
            action = first if number == 0 else make()
            found, of_out, of_state = _judge(action, run)
            faults += [f"{action.full.case.op}: {fault}" if len(actions) > 1 else fault for fault in found]
            if of_out is not None:
                out_error = max(out_error or 0.0, of_out)
            state_error = max(state_error, of_state)
            if found:
                break
    finally:
        for name, buffer in first.part.buffers.items():
            buffer.copy_(original[name])
    return Verdict(tuple(faults), out_error, state_error)


def _judge(action: JudgedAction, run: Run) -> tuple[list[str], float | None, float]:
    """Faults, and the largest relative errors of output and states."""
    part, truth = action.part, action.truth
    before = {name: buffer.clone() for name, buffer in part.buffers.items()}
    if action.full.out is not None:
        action.full.out.fill_(torch.nan)
    out = run(action.full)
    faults: list[str] = []
    out_error = None
    if part.case.op in ("decode", "verify"):
        assert out is not None
        got = out[list(action.rows)]
        got = got if part.case.op == "verify" else got[:, None]
        faults += window_out_errors(got, part, truth)
        out_error = _worst([(got[key], true) for key, true in truth.outputs.items()])
    faults += window_state_errors(part, truth)
    state_error = _worst([(_states(part, *key), true) for key, true in truth.states.items()])
    _take_over_other_rows(action, before)
    faults += untouched_errors(part, truth, before)
    return faults, out_error, state_error


def _take_over_other_rows(action: JudgedAction, before: dict[str, torch.Tensor]) -> None:
    """Let what the rows that are not judged may write count as unchanged."""
    full, window = action.full, action.full.window
    if full.case.op in CURSOR_OPS:
        return
    others = full.s_offsets.long().clone()
    others[list(action.rows)] = -1
    others = others[others >= 0]
    states = torch.unflatten(full.s, -3, (-1, full.case.H))
    stacked = full.case.L > 0
    views = [("s", states)]
    if full.case.op in ("decode", "verify"):
        views += [("window_k", window.k), ("window_v", window.v)]
    for name, view in views:
        mirror = before[name].as_strided(view.shape, view.stride(), view.storage_offset())
        if stacked:
            mirror[:, others] = view[:, others]
        else:
            mirror[others] = view[others]


def _states(inputs: WindowInputs, layer: int, slot: int) -> torch.Tensor:
    s = inputs.s[layer] if inputs.case.L else inputs.s
    return s[slot * inputs.case.H : (slot + 1) * inputs.case.H]


def _worst(pairs: Sequence[tuple[torch.Tensor, TrueValue]]) -> float:
    """The largest relative L2 error of a head."""
    worst = 0.0
    for got, true in pairs:
        wanted = true.value.flatten(1)
        error = (got.detach().cpu().double().flatten(1) - wanted).norm(dim=1)
        relative = error / wanted.norm(dim=1).clamp_min(torch.finfo(torch.float64).tiny)
        worst = max(worst, float(relative.nan_to_num(nan=torch.inf).max()))
    return worst
