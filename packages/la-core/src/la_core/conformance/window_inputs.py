"""Tensors of a window case, laid out to catch what a wrong kernel touches.

Everything a call must not read is NaN: spare slots, gaps, padding rows, drafts behind a draft length, and the places of
a ring that are not pending. Counts of padding rows are nonsense. An `out` is NaN before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from la_core.conformance.window_cases import WindowCase
from la_core.conformance.window_truth import (
    WindowTruth,
    advance_truth,
    clear_truth,
    commit_truth,
    decode_window_truth,
    verify_truth,
)
from la_core.spec.kv_window import KVWindow

Counts = torch.Tensor | int | None

NONSENSE = 1 << 20
"""The counts of padding rows."""


@dataclass(frozen=True)
class WindowInputs:
    """The arguments of one call, and under readable names the buffers whose views they are.

    All operators have a window and slots. `q`, `k`, `v` and `out` belong to decode and verify; `s` and `decay_scales`
    to all but advance and clear, which get them all the same and must leave them alone.
    """

    case: WindowCase
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    s: torch.Tensor
    s_offsets: torch.Tensor
    decay_scales: torch.Tensor
    window: KVWindow
    counts: Counts
    out: torch.Tensor | None
    buffers: dict[str, torch.Tensor]

    def truth(self) -> WindowTruth:
        """What a call with the present values must produce."""
        tokens = (self.q, self.k, self.v, self.s, self.s_offsets, self.decay_scales, self.window)
        pool = (self.window, self.s, self.s_offsets, self.decay_scales)
        scale = self.case.softmax_scale
        if self.case.op == "decode":
            return decode_window_truth(*tokens, scale)
        if self.case.op == "verify":
            counts = None if self.counts is None else torch.as_tensor(self.counts).expand(self.case.B)
            return verify_truth(*tokens, counts, scale)
        if self.case.op in ("fold", "commit"):
            return commit_truth(*pool, 0 if self.counts is None else self.counts, self.case.room)
        if self.case.op == "advance":
            accepted = 1 if self.counts is None else self.counts
            return advance_truth(self.window, self.s_offsets, accepted, self.case.room)
        return clear_truth(self.window, self.s_offsets, self.case.room)

    def of_rows(self, rows: Sequence[int], slots: Sequence[int], P: int) -> WindowInputs:
        """The same rows with other neighbours: a batch of `rows`, row i in `slots[i]` of a pool of `P` slots.

        Dense tensors without gaps; what no row names is NaN, as before.
        """
        H, layers = self.case.H, self.case.L > 0
        states = torch.unflatten(self.s, -3, (-1, H))
        s = _like_with(self.s, self.s.ndim - 3, P * H)
        if self.case.state_layout == "kv":
            s = s.mT.contiguous().mT
        window = KVWindow(
            *(_like_with(t, t.ndim - 4, P) for t in (self.window.k, self.window.v)),
            *(_like_with(t, 0, P) for t in (self.window.start, self.window.length)),
        )
        for row, slot in zip(rows, slots, strict=True):
            old = int(self.s_offsets[row])
            if slot < 0:
                continue
            torch.unflatten(s, -3, (P, H)).select(-4, slot).copy_(states.select(-4, old))
            for name in ("k", "v", "start", "length"):
                new_part, old_part = getattr(window, name), getattr(self.window, name)
                axis = 1 if layers and name in "kv" else 0
                new_part.select(axis, slot).copy_(old_part.select(axis, old))
        return replace(
            self,
            q=self.q[list(rows)],
            k=self.k[list(rows)],
            v=self.v[list(rows)],
            s=s,
            s_offsets=torch.tensor(slots, dtype=self.s_offsets.dtype, device=s.device),
            window=window,
            counts=self.counts[list(rows)] if isinstance(self.counts, torch.Tensor) else self.counts,
            out=None if self.out is None else torch.empty_like(self.out[list(rows)]),
            buffers={},
        )


def _like_with(tensor: torch.Tensor, axis: int, size: int) -> torch.Tensor:
    """An empty tensor of another size along an axis: NaN, or 0."""
    shape = [*tensor.shape[:axis], size, *tensor.shape[axis + 1 :]]
    poison = torch.nan if tensor.dtype.is_floating_point else 0
    return torch.full(shape, poison, dtype=tensor.dtype, device=tensor.device)


class _Memory:
    """Poisoned buffers on a device, and views into them with `shift` elements in front and behind."""

    def __init__(self, device: torch.device | str, shift: int) -> None:
        self.device, self.shift = device, shift
        self.buffers: dict[str, torch.Tensor] = {}

    def place(self, name: str, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        last = sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) + 1 if 0 not in shape else 0
        poison = torch.nan if dtype.is_floating_point else NONSENSE
        self.buffers[name] = torch.full((self.shift + last + self.shift,), poison, dtype=dtype, device=self.device)
        return self.buffers[name].as_strided(shape, stride, self.shift)

    def numbers(self, name: str, values: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A vector of whole numbers."""
        tensor = self.place(name, (len(values),), (1,), dtype)
        tensor.copy_(torch.tensor(values, dtype=torch.int64))
        return tensor


def make_window_inputs(case: WindowCase, device: torch.device | str = "cpu") -> WindowInputs:
    """The tensors of a case: drawn on the CPU, then laid out on the device with strides, gaps and shift."""
    random = torch.Generator().manual_seed(case.seed)
    memory = _Memory(device, case.shift)
    offsets = list(case.offsets) if case.offsets is not None else _draw_offsets(case, random)
    slots = [slot if slot >= 0 else None for slot in offsets]
    counts = _draw_counts(case, slots, random)
    starts, lengths = _draw_cursors(case, slots, counts, random)
    if case.counts is None and case.counts_dtype is not None and case.op in ("commit", "advance"):
        counts = [
            NONSENSE if slot is None else int(torch.randint(0, case.N - lengths[slot] + 1, (1,), generator=random))
            for slot in slots
        ]
    window = KVWindow(
        *_window_memory(case, memory),
        memory.numbers("start", starts, torch.int32),
        memory.numbers("length", lengths, torch.int32),
    )
    _fill_window(case, window, slots, counts, random)
    q, k, v = _tokens(case, memory, slots, counts, random)
    s = _states(case, memory, slots, random)
    layers = max(case.L, 1)
    decay_scales = memory.place("decay_scales", (layers, case.H), (case.H, 1), torch.float32)
    slopes = torch.tensor(case.decays) if case.decays else torch.logspace(-1.7, 0, case.H)
    for layer in range(layers):
        decay_scales[layer].copy_(slopes * (1 + 0.5 * layer))
    given: Counts = None
    if isinstance(case.counts, int):
        given = case.counts
    elif counts is not None:
        given = memory.numbers("counts", counts, case.counts_dtype or torch.int32)
    s_offsets = memory.numbers("s_offsets", offsets, case.offsets_dtype)
    return WindowInputs(
        case, q, k, v, s, s_offsets, decay_scales if case.L else decay_scales[0], window, given, _out(case, memory),
        memory.buffers,
    )  # fmt: skip


def _draw_offsets(case: WindowCase, random: torch.Generator) -> list[int]:
    padding = round(case.B * case.padding)
    slots = torch.randperm(case.P, generator=random)[: case.B - padding].tolist()
    offsets = slots + [-1 - n for n in range(padding)]
    if len(offsets) < case.B:
        raise ValueError(f"case {case.id}: {case.B - padding} live rows need as many slots, P is {case.P}")
    return [offsets[i] for i in torch.randperm(case.B, generator=random).tolist()]


def _draw_counts(case: WindowCase, slots: list[int | None], random: torch.Generator) -> list[int] | None:
    """The counts of all rows, nonsense in padding rows; None if there are none or they depend on the cursors."""
    if isinstance(case.counts, tuple):
        return [NONSENSE if slot is None else n for n, slot in zip(case.counts, slots, strict=True)]
    if isinstance(case.counts, int):
        return [case.counts] * case.B
    if case.op == "verify" and case.counts_dtype is not None:
        drawn = torch.randint(0, case.T + 1, (case.B,), generator=random).tolist()
        return [NONSENSE if slot is None else n for n, slot in zip(drawn, slots, strict=True)]
    return None


def _draw_cursors(
    case: WindowCase, slots: list[int | None], counts: list[int] | None, random: torch.Generator
) -> tuple[list[int], list[int]]:
    """Start and length of every slot of the pool; those that no row names get some as well."""
    starts = torch.randint(0, case.N, (case.P,), generator=random).tolist()
    lengths = torch.randint(0, case.N + 1, (case.P,), generator=random).tolist()
    for b, slot in enumerate(slots):
        if slot is None:
            continue
        if case.starts is not None:
            starts[slot] = case.starts[b]
        if case.lengths is not None:
            lengths[slot] = case.lengths[b]
        elif case.op == "verify":
            lengths[slot] %= case.N - case.T + 1
        elif counts is not None:
            lengths[slot] %= case.N - counts[b] + 1
    return starts, lengths


def _window_memory(case: WindowCase, memory: _Memory) -> tuple[torch.Tensor, torch.Tensor]:
    """The window's k and v, NaN all over."""
    G = case.G or case.H
    k_width, v_width = G * case.K, case.H * case.V
    dtype = case.window_dtype or case.io_dtype
    front = (case.L,) if case.L else ()

    def strides(width: int) -> tuple[int, ...]:
        place = width + case.window_gap
        slot = case.N * place + case.window_gap
        return (case.P * slot + case.window_gap, slot, place)[0 if case.L else 1 :]

    if case.fused_window:
        both = strides(k_width + v_width)
        fused = memory.place("window_kv", (*front, case.P, case.N, k_width + v_width), (*both, 1), dtype)
        k, v = fused[..., :k_width], fused[..., k_width:]
    else:
        k = memory.place("window_k", (*front, case.P, case.N, k_width), (*strides(k_width), 1), dtype)
        v = memory.place("window_v", (*front, case.P, case.N, v_width), (*strides(v_width), 1), dtype)
    return torch.unflatten(k, -1, (G, case.K)), torch.unflatten(v, -1, (case.H, case.V))


def _fill_window(
    case: WindowCase,
    window: KVWindow,
    slots: list[int | None],
    counts: list[int] | None,
    random: torch.Generator,
) -> None:
    """Pending tokens of the named slots, and the drafts behind them that a commit accepts."""
    for b, slot in enumerate(slots):
        if slot is None:
            continue
        drafts = counts[b] if counts is not None and case.op == "commit" else 0
        start, length = int(window.start[slot]), int(window.length[slot])
        # What does not fit is limited, or refused: either way nothing more is read.
        for i in range(min(length + max(drafts, 0), case.N)):
            place = (start + i) % case.N
            for tensor in (window.k, window.v):
                token = tensor[..., slot, place, :, :]
                token.copy_(torch.randn(token.shape, generator=random))


def _tokens(
    case: WindowCase,
    memory: _Memory,
    slots: list[int | None],
    counts: list[int] | None,
    random: torch.Generator,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v, NaN in padding rows and behind the draft lengths."""
    G = case.G or case.H
    widths = (G * case.K, G * case.K, case.H * case.V)

    def strides(width: int) -> tuple[int, int, int]:
        return (width, case.B * width, 1) if case.tokens_first else (case.T * width, width, 1)

    if case.fused_qkv:
        fused = memory.place("qkv", (case.B, case.T, sum(widths)), strides(sum(widths)), case.io_dtype)
        parts = list(torch.split(fused, list(widths), dim=2))
    else:
        parts = [
            memory.place(name, (case.B, case.T, width), strides(width), case.io_dtype)
            for name, width in zip("qkv", widths, strict=True)
        ]
    for part in parts:
        values = torch.randn(part.shape, generator=random)
        for b, slot in enumerate(slots):
            drafts = case.T if counts is None or case.op != "verify" else counts[b]
            values[b, 0 if slot is None else max(drafts, 0) :] = torch.nan
        part.copy_(values)
    heads = ((G, case.K), (G, case.K), (case.H, case.V))
    q, k, v = (torch.unflatten(part, 2, shape) for part, shape in zip(parts, heads, strict=True))
    return (q, k, v) if case.op == "verify" else (q[:, 0], k[:, 0], v[:, 0])


def _states(case: WindowCase, memory: _Memory, slots: list[int | None], random: torch.Generator) -> torch.Tensor:
    """The pool, of all layers if they are stacked; NaN in slots that no row names."""
    row = case.K * case.V + case.pool_gap
    matrix = (case.K, 1) if case.state_layout == "vk" else (1, case.V)
    layers = max(case.L, 1)
    shape = (layers, case.P * case.H, case.V, case.K)
    s = memory.place("s", shape, (case.P * case.H * row + case.pool_gap, row, *matrix), case.state_dtype)
    for slot in (slot for slot in slots if slot is not None):
        states = s[:, slot * case.H : (slot + 1) * case.H]
        states.copy_(torch.randn(states.shape, generator=random))
    return s if case.L else s[0]


def _out(case: WindowCase, memory: _Memory) -> torch.Tensor | None:
    if case.op not in ("decode", "verify") or (case.out_dtype is None and not case.out_gap):
        return None
    width = case.H * case.V + case.out_gap
    stride = (width, case.B * width) if case.tokens_first else (case.T * width, width)
    shape = (case.B, case.T, case.H, case.V)
    out = memory.place("out", shape, (*stride, case.V, 1), case.out_dtype or case.io_dtype)
    return out if case.op == "verify" else out[:, 0]
