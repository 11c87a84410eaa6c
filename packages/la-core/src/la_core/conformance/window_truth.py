"""The truth of the window operators: float64, the recurrence itself, as plain loops over rows, tokens and heads.

Nothing here uses a power of the decay: the pending tokens of a slot are brought in one by one, as decode would have.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from la_core.spec.kv_window import KVWindow


@dataclass(frozen=True)
class TrueValue:
    """States [H, V, K] or outputs [H, V] in float64, and what their rounding errors scale with.

    Attributes
    ----------
    value
        What it is.
    magnitude
        The same of absolute values, which cancellation cannot make small.
    aged
        Like `magnitude`, with each token's share times its age: the steps by which it has decayed since it came in.
    tokens
        How many tokens came in since the state was stored.
    """

    value: torch.Tensor
    magnitude: torch.Tensor
    aged: torch.Tensor
    tokens: int

    @classmethod
    def of_states(cls, states: torch.Tensor) -> TrueValue:
        """States [H, V, K] as they are stored."""
        value = states.detach().cpu().double()
        return cls(value, value.abs(), torch.zeros_like(value), 0)

    def after(self, k: torch.Tensor, v: torch.Tensor, decay_scales: torch.Tensor) -> TrueValue:
        """The states after one more token with k [G, K] and v [H, V] under slopes [H]."""
        k, v = k.detach().cpu().double(), v.detach().cpu().double()
        decays = torch.exp(-decay_scales.detach().cpu().double())
        value, magnitude, aged = (torch.empty_like(self.value) for _ in range(3))
        H, G = v.shape[0], k.shape[0]
        for h in range(H):
            g = h // (H // G)
            value[h] = decays[h] * self.value[h] + torch.outer(v[h], k[g])
            magnitude[h] = decays[h] * self.magnitude[h] + torch.outer(v[h].abs(), k[g].abs())
            aged[h] = decays[h] * (self.aged[h] + self.magnitude[h])
        return TrueValue(value, magnitude, aged, self.tokens + 1)

    def output(self, q: torch.Tensor, scale: float) -> TrueValue:
        """What a query q [G, K] reads from these states."""
        q = q.detach().cpu().double()
        H, G = self.value.shape[0], q.shape[0]
        value, magnitude, aged = (torch.empty(self.value.shape[:2], dtype=torch.float64) for _ in range(3))
        for h in range(H):
            g = h // (H // G)
            value[h] = scale * (self.value[h] @ q[g])
            magnitude[h] = abs(scale) * (self.magnitude[h] @ q[g].abs())
            aged[h] = abs(scale) * (self.aged[h] @ q[g].abs())
        return TrueValue(value, magnitude, aged, self.tokens)


@dataclass(frozen=True)
class WindowTruth:
    """What one call must produce; whatever is not named here must stay as it is.

    Attributes
    ----------
    outputs
        By row and token. An output that is not named is zero, but for those of `no_room`.
    no_room
        Rows whose window has no room for their drafts: outputs in front of the draft length are NaN.
    states
        By layer and slot: states that are written.
    places
        By slot and place: k [G, K] and v [H, V] that are written into the window.
    start, length
        The cursors afterwards, [P] int32.
    """

    outputs: dict[tuple[int, int], TrueValue]
    no_room: frozenset[int]
    states: dict[tuple[int, int], TrueValue]
    places: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]
    start: torch.Tensor
    length: torch.Tensor


def pending_places(window: KVWindow, slot: int, extra: int = 0) -> list[int]:
    """The places of a slot's pending tokens and of `extra` drafts behind them, oldest first.

    As kernels must, it takes a length outside of 0 ... N for the nearest of these, and any start modulo N.
    """
    places = window.k.shape[-3]
    count = min(max(int(window.length[slot]), 0), places)
    return [(int(window.start[slot]) + i) % places for i in range(count + extra)]


def value_of_slot(
    window: KVWindow, s: torch.Tensor, slot: int, decay_scales: torch.Tensor, extra: int = 0
) -> TrueValue:
    """A slot's states with all pending tokens and `extra` drafts brought in; window and pool of one layer."""
    H = decay_scales.shape[0]
    value = TrueValue.of_states(s[slot * H : (slot + 1) * H])
    for place in pending_places(window, slot, extra):
        value = value.after(window.k[slot, place], window.v[slot, place], decay_scales)
    return value


def decode_window_truth(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    s: torch.Tensor,
    s_offsets: torch.Tensor,
    decay_scales: torch.Tensor,
    window: KVWindow,
    softmax_scale: float | None = None,
) -> WindowTruth:
    """Decode with a window: q, k [B, G, K], v [B, H, V]; outputs are named with token 0."""
    scale = q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    truth = _nothing(window)
    N = window.k.shape[1]
    for b, slot in _live(s_offsets, window):
        new = value_of_slot(window, s, slot, decay_scales).after(k[b], v[b], decay_scales)
        truth.outputs[b, 0] = new.output(q[b], scale)
        if new.tokens > N:
            truth.states[0, slot] = new
        else:
            truth.places[slot, pending_places(window, slot, 1)[-1]] = (k[b], v[b])
    return truth


def verify_truth(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    s: torch.Tensor,
    s_offsets: torch.Tensor,
    decay_scales: torch.Tensor,
    window: KVWindow,
    draft_lengths: torch.Tensor | None = None,
    softmax_scale: float | None = None,
) -> WindowTruth:
    """Verify: q, k [B, T, G, K], v [B, T, H, V]."""
    T, N = q.shape[1], window.k.shape[1]
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    truth, no_room = _nothing(window), set()
    for b, slot in _live(s_offsets, window):
        drafts = T if draft_lengths is None else min(max(int(draft_lengths[b]), 0), T)
        pending = len(pending_places(window, slot))
        if pending + drafts > N:
            no_room.add(b)
            continue
        value = value_of_slot(window, s, slot, decay_scales)
        for t, place in enumerate(pending_places(window, slot, drafts)[pending:]):
            value = value.after(k[b, t], v[b, t], decay_scales)
            truth.outputs[b, t] = value.output(q[b, t], scale)
            truth.places[slot, place] = (k[b, t], v[b, t])
    return WindowTruth(truth.outputs, frozenset(no_room), {}, truth.places, truth.start, truth.length)


def commit_truth(
    window: KVWindow,
    s: torch.Tensor,
    s_offsets: torch.Tensor,
    decay_scales: torch.Tensor,
    accepted: torch.Tensor | int = 0,
    room: int | None = None,
) -> WindowTruth:
    """Fold (`accepted` 0), commit and commit_layers: of all layers if the window is stacked."""
    stacked = window.k.ndim == 5
    layers = window.k.shape[0] if stacked else 1
    truth = _nothing(window)
    N = window.k.shape[-3]
    for layer in range(layers):
        its_window = window.layer(layer) if stacked else window
        its_s, its_slopes = (s[layer], decay_scales[layer]) if stacked else (s, decay_scales)
        for b, slot in _live(s_offsets, window):
            pending = len(pending_places(window, slot))
            drafts = min(max(_count(accepted, b), 0), N - pending)
            if pending + drafts > 0 and (room is None or pending + drafts + room > N):
                truth.states[layer, slot] = value_of_slot(its_window, its_s, slot, its_slopes, drafts)
    return truth


def advance_truth(
    window: KVWindow, s_offsets: torch.Tensor, accepted: torch.Tensor | int = 1, room: int | None = None
) -> WindowTruth:
    """Advance: the accepted tokens are pending, or a window that was full is empty, if there are any.

    With `room` a window that has less left is empty, and starts behind them.
    """
    truth = _nothing(window)
    N = window.k.shape[-3]
    for b, slot in _live(s_offsets, window):
        pending = len(pending_places(window, slot))
        tokens = max(_count(accepted, b), 0)
        truth.length[slot] = 0 if pending == N and tokens else min(pending + tokens, N)
        if room is not None and (end := min(pending + tokens, N)) + room > N:
            truth.start[slot], truth.length[slot] = (int(window.start[slot]) + end) % N, 0
    return truth


def clear_truth(window: KVWindow, s_offsets: torch.Tensor, room: int | None = None) -> WindowTruth:
    """Clear: windows are empty, and start behind the old tokens; with `room` only those that have less."""
    truth = _nothing(window)
    N = window.k.shape[-3]
    for _, slot in _live(s_offsets, window):
        pending = len(pending_places(window, slot))
        if room is None or pending + room > N:
            truth.start[slot] = (int(window.start[slot]) + pending) % N
            truth.length[slot] = 0
    return truth


def _nothing(window: KVWindow) -> WindowTruth:
    start, length = (cursor.detach().cpu().clone() for cursor in (window.start, window.length))
    return WindowTruth({}, frozenset(), {}, {}, start, length)


def _live(s_offsets: torch.Tensor, window: KVWindow) -> list[tuple[int, int]]:
    """Rows that are not padding, with their slots."""
    slots = window.start.shape[0]
    return [(b, slot) for b, slot in enumerate(s_offsets.tolist()) if 0 <= slot < slots]


def _count(counts: torch.Tensor | int, b: int) -> int:
    return int(counts[b]) if isinstance(counts, torch.Tensor) else counts
