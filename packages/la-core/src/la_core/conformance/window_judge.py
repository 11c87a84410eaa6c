"""The verdict on a call of a window operator: values against the truth, and bits of everything that must not change."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from la_core.conformance.compare import JudgedRow, first_difference, same_bits, value_errors
from la_core.conformance.tolerances import WindowTolerance, window_out_tolerance, window_state_tolerance
from la_core.conformance.window_inputs import WindowInputs
from la_core.conformance.window_truth import TrueValue, WindowTruth

Call = Callable[[WindowInputs], torch.Tensor | None]
"""Makes the call; returns the output of decode and verify."""


def judge_window(inputs: WindowInputs, call: Call, truth: WindowTruth | None = None) -> list[str]:
    """Make one call and say everything that is wrong with what it did, in one sentence per kind of fault.

    `truth` is that of the inputs, for callers that have it already.
    """
    truth = truth or inputs.truth()
    before = {name: buffer.clone() for name, buffer in inputs.buffers.items()}
    out = call(inputs)
    errors: list[str] = []
    if inputs.case.op in ("decode", "verify"):
        if inputs.out is not None and out is not inputs.out:
            errors.append("the returned tensor must be the out that was given")
        shape = (*inputs.q.shape[:-2], *inputs.v.shape[-2:])
        if out is None or tuple(out.shape) != shape:
            return [*errors, f"out must have shape {shape}, has {None if out is None else tuple(out.shape)}"]
        errors += window_out_errors(out if inputs.case.op == "verify" else out[:, None], inputs, truth)
    elif out is not None:
        errors.append(f"{inputs.case.op} must return nothing, returned a {type(out).__name__}")
    errors += window_state_errors(inputs, truth)
    return errors + list(untouched_errors(inputs, truth, before))


def window_out_errors(out: torch.Tensor, inputs: WindowInputs, truth: WindowTruth) -> Iterator[str]:
    """A sentence for every way in which `out` [B, T, H, V] is wrong."""
    got = out.detach().cpu().double()
    for b in range(got.shape[0]):
        for t in range(got.shape[1]):
            where = f"out of row {b}, token {t}"
            if (b, t) in truth.outputs:
                continue
            if b in truth.no_room and t < _drafts(inputs, b):
                if not bool(got[b, t].isnan().all()):
                    yield f"{where} must be NaN, as the window has no room; is {got[b, t].flatten()[:3].tolist()} ..."
            elif not bool((got[b, t] == 0).all()):
                yield f"{where} must be zero; is {got[b, t].flatten()[:3].tolist()} ..."
    K = inputs.q.shape[-1]
    slopes = inputs.decay_scales
    yield from value_errors(
        "out",
        (
            judged(f"row {b}, token {t}", got[b, t], true, window_out_tolerance(out.dtype, K, slopes, true.tokens))
            for (b, t), true in truth.outputs.items()
        ),
    )


def window_state_errors(inputs: WindowInputs, truth: WindowTruth) -> Iterator[str]:
    """A sentence if states that a call must write are wrong."""
    yield from value_errors("state", (_judged_states(inputs, *key, true) for key, true in truth.states.items()))


def untouched_errors(inputs: WindowInputs, truth: WindowTruth, before: dict[str, torch.Tensor]) -> Iterator[str]:
    """A sentence for everything that changed although it must not, and for tokens and cursors that were not written.

    `before` holds copies of the buffers from before the call.
    """
    for name in ("start", "length"):
        got, expected = getattr(inputs.window, name).detach().cpu(), getattr(truth, name)
        N = inputs.case.N
        # A start that was out of range may be left as it is or taken modulo N.
        same = (got == expected) | ((name == "start") & (expected // N != 0) & (got % N == expected % N))
        if not bool(same.all()):
            yield f"window.{name} must be {expected.tolist()}, is {got.tolist()}"
    window = inputs.window
    wrong = [
        f"place {place} of slot {slot}"
        for (slot, place), (k, v) in truth.places.items()
        if not same_bits(window.k[slot, place], k.to(window.k.dtype))
        or not same_bits(window.v[slot, place], v.to(window.v.dtype))
    ]
    if wrong:
        yield f"the window must hold the new tokens' k and v at {', '.join(wrong)}"
    written = _written(inputs, truth)
    for name, buffer in inputs.buffers.items():
        # What may change takes the same values in both copies, then all bits must agree.
        views = written.get(name)
        was, now = (before[name].clone(), buffer.clone()) if views else (before[name], buffer)
        for view in views or ():
            _like(view, was).zero_()
            _like(view, now).zero_()
        if not same_bits(was, now):
            yield f"{_WHAT.get(name, name)} must not change: {first_difference(was, now)}"


def judged(name: str, got: torch.Tensor, true: TrueValue, tolerance: WindowTolerance) -> JudgedRow:
    """A row for :func:`value_errors`: `got` [H, ...] against its truth."""
    value, magnitude, aged = (t.flatten(1) for t in (true.value, true.magnitude, true.aged))
    allowed = tolerance.allowed(value.norm(dim=1), magnitude.norm(dim=1), aged.norm(dim=1), value.shape[1])
    return name, got.detach().cpu().double(), true.value, allowed


_WHAT = {
    "s": "the pool outside of the states to write",
    "window_k": "the window's k outside of the new tokens' places",
    "window_v": "the window's v outside of the new tokens' places",
    "window_kv": "the window outside of the new tokens' places",
    "out": "the gaps of out",
    "start": "the memory around window.start",
    "length": "the memory around window.length",
}


def _drafts(inputs: WindowInputs, b: int) -> int:
    if inputs.counts is None:
        return inputs.case.T
    count = inputs.counts if isinstance(inputs.counts, int) else int(inputs.counts[b])
    return min(max(count, 0), inputs.case.T)


def _judged_states(inputs: WindowInputs, layer: int, slot: int, true: TrueValue) -> JudgedRow:
    stacked = inputs.case.L > 0
    s, slopes = (inputs.s[layer], inputs.decay_scales[layer]) if stacked else (inputs.s, inputs.decay_scales)
    got = s[slot * inputs.case.H : (slot + 1) * inputs.case.H]
    name = f"slot {slot}" + (f" of layer {layer}" if stacked else "")
    return judged(name, got, true, window_state_tolerance(s.dtype, slopes, true.tokens))


def _written(inputs: WindowInputs, truth: WindowTruth) -> dict[str, list[torch.Tensor]]:
    """Views of what the call may write, by buffer."""
    H, stacked = inputs.case.H, inputs.case.L > 0
    window = inputs.window
    tokens = [(window.k[slot, place], window.v[slot, place]) for slot, place in truth.places]
    pools = [inputs.s[layer] if stacked else inputs.s for layer, _ in truth.states]
    return {
        "window_k": [k for k, _ in tokens],
        "window_v": [v for _, v in tokens],
        "window_kv": [part for token in tokens for part in token],
        "s": [pool[slot * H : (slot + 1) * H] for pool, (_, slot) in zip(pools, truth.states, strict=True)],
        "out": [] if inputs.out is None else [inputs.out],
        "start": [window.start],
        "length": [window.length],
    }


def _like(view: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    return buffer.as_strided(view.shape, view.stride(), view.storage_offset())
