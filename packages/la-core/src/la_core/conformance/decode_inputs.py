"""Tensors of a case, laid out to catch what a wrong kernel touches, and the verdict on a call.

Everything a call must not read is NaN: spare slots, gaps in the pool, padding rows of q, k and v. Everything it must
write is NaN before. Everything it must not write is compared bit for bit afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch

from la_core.conformance.compare import first_difference, out_errors, same_bits, state_errors
from la_core.conformance.decode_cases import DecodeCase
from la_core.conformance.decode_truth import DecodeTruth, decode_truth

SixTensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""The type of the positional arguments."""


@dataclass(frozen=True)
class DecodeInputs:
    """The arguments of one call, and under the same names the buffers whose views they are."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    s: torch.Tensor
    s_offsets: torch.Tensor
    decay_scales: torch.Tensor
    softmax_scale: float | None
    out: torch.Tensor | None
    buffers: dict[str, torch.Tensor]

    def truth(self) -> DecodeTruth:
        """What a call with the present values must produce."""
        return decode_truth(self.q, self.k, self.v, self.s, self.s_offsets, self.decay_scales, self.softmax_scale)

    def tensors(self) -> SixTensors:
        """The positional arguments of :func:`la_core.decode`."""
        return (self.q, self.k, self.v, self.s, self.s_offsets, self.decay_scales)

    def live_slots(self) -> list[int]:
        """The slots that the offsets name."""
        slots = self.s.shape[0] // self.decay_scales.shape[0]
        return [slot for slot in self.s_offsets.tolist() if 0 <= slot < slots]


def make_decode_inputs(case: DecodeCase, device: torch.device | str = "cpu") -> DecodeInputs:
    """The tensors of a case: drawn on the CPU, then laid out on the device with strides, gaps and shift."""
    G = case.G or case.H
    # What is drawn follows from sizes, slots and seed, whatever the layout.
    sizes = (case.B, case.P, case.H, case.K, case.V, G)
    drawn = _draw(DecodeCase(*sizes, offsets=case.offsets, padding=case.padding, seed=case.seed))
    offsets = drawn.offsets
    buffers: dict[str, torch.Tensor] = {}

    def place(name: str, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A poisoned view of a buffer of its own, `case.shift` elements in."""
        size = case.shift + (
            sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) + 1 if 0 not in shape else 0
        )
        buffers[name] = torch.full((size,), torch.nan if dtype.is_floating_point else 0, dtype=dtype, device=device)
        return buffers[name].as_strided(shape, stride, case.shift)

    widths = {"q": G * case.K, "k": G * case.K, "v": case.H * case.V}
    if case.fused_qkv:
        fused = place("qkv", (case.B, sum(widths.values())), (sum(widths.values()), 1), case.io_dtype)
        q, k, v = torch.split(fused, list(widths.values()), dim=1)
    else:
        q, k, v = (place(name, (case.B, n), (n, 1), case.io_dtype) for name, n in widths.items())
    for tensor, values in zip((q, k, v), drawn.tokens, strict=True):
        tensor.copy_(values)

    row_stride = case.K * case.V + case.pool_gap
    matrix = (case.K, 1) if case.state_layout == "vk" else (1, case.V)
    s = place("s", (case.P * case.H, case.V, case.K), (row_stride, *matrix), case.state_dtype)
    live = [slot for slot in offsets if slot >= 0]
    if live:
        states = drawn.states.to(case.state_dtype).to(device)
        torch.unflatten(s, 0, (case.P, case.H))[torch.tensor(live, device=device)] = states

    s_offsets = place("s_offsets", (case.B,), (1,), case.offsets_dtype)
    s_offsets.copy_(torch.tensor(offsets, dtype=torch.int64))
    decay_scales = place("decay_scales", (case.H,), (1,), torch.float32)
    decay_scales.copy_(torch.tensor(case.decays) if case.decays else torch.logspace(-1.7, 0, case.H))

    out = None
    if case.out_dtype is not None or case.out_gap:
        width = case.H * case.V + case.out_gap
        out = place("out", (case.B, case.H, case.V), (width, case.V, 1), case.out_dtype or case.io_dtype)
    return DecodeInputs(
        q.view(case.B, G, case.K),
        k.view(case.B, G, case.K),
        v.view(case.B, case.H, case.V),
        s,
        s_offsets,
        decay_scales,
        case.softmax_scale,
        out,
        buffers,
    )


def judge_decode(inputs: DecodeInputs, call: Callable[[DecodeInputs], torch.Tensor]) -> list[str]:
    """Make one call and say everything that is wrong with what it did.

    Parameters
    ----------
    inputs
        Fresh inputs; their pool and output are written.
    call
        Makes the call and returns the output.

    Returns
    -------
    list of str
        One sentence per fault: values of output and states, padding rows, memory that changed although it must not.
    """
    truth = inputs.truth()
    before = {name: buffer.clone() for name, buffer in inputs.buffers.items()}
    out = call(inputs)
    errors = []
    if inputs.out is not None and out is not inputs.out:
        errors.append("the returned tensor must be the out that was given")
    if tuple(out.shape) != (*inputs.q.shape[:1], *inputs.v.shape[1:]):
        return [*errors, f"out must have shape {tuple(inputs.v.shape)}, has {tuple(out.shape)}"]
    errors += out_errors(out, truth, inputs.decay_scales, inputs.q.shape[2])
    errors += state_errors(inputs.s, inputs.s_offsets, truth, inputs.decay_scales)
    return errors + untouched_errors(inputs, before)


def untouched_errors(inputs: DecodeInputs, before: dict[str, torch.Tensor]) -> list[str]:
    """A sentence for every buffer that changed outside of the named slots and of `out`; `before` holds its copies."""
    errors = []
    for name, buffer in inputs.buffers.items():
        # What may change takes the same values in both copies, then all bits must agree.
        was, now = before[name].clone(), buffer.clone()
        if name == "s":
            for slot in inputs.live_slots():
                H = inputs.decay_scales.shape[0]
                _like(inputs.s, was)[slot * H : (slot + 1) * H] = 0
                _like(inputs.s, now)[slot * H : (slot + 1) * H] = 0
        elif name == "out" and inputs.out is not None:
            _like(inputs.out, was).zero_()
            _like(inputs.out, now).zero_()
        if not same_bits(was, now):
            what = {"s": "the pool outside of the named slots", "out": "the gaps of out"}.get(name, name)
            errors.append(f"{what} must not change: {first_difference(was, now)}")
    return errors


def _like(view: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    return buffer.as_strided(view.shape, view.stride(), view.storage_offset())


@dataclass(frozen=True)
class _Drawn:
    """What is random in a case, in float32 on the CPU: rows of q, k and v, those of padding NaN, and live states."""

    offsets: list[int]
    tokens: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    states: torch.Tensor  # [rows that are not padding, H, V, K]


@lru_cache(maxsize=2)
def _draw(case: DecodeCase) -> _Drawn:
    """Kept for the next calls, as a test makes the tensors of one case several times; nobody writes into them."""
    random = torch.Generator().manual_seed(case.seed)
    offsets = list(case.offsets) if case.offsets is not None else _draw_offsets(case, random)
    q, k, v = (
        torch.randn(case.B, width, generator=random) for width in (case.G * case.K, case.G * case.K, case.H * case.V)
    )
    for tensor in (q, k, v):
        tensor[[b for b, slot in enumerate(offsets) if slot < 0]] = torch.nan
    states = torch.randn(sum(slot >= 0 for slot in offsets), case.H, case.V, case.K, generator=random)
    return _Drawn(offsets, (q, k, v), states)


def _draw_offsets(case: DecodeCase, random: torch.Generator) -> list[int]:
    count = round(case.B * case.padding)
    slots = torch.randperm(case.P, generator=random)[: case.B - count].tolist()
    if len(slots) < case.B - count:
        raise ValueError(f"case {case.id}: {case.B - count} live rows need as many slots, P is {case.P}")
    offsets = slots + [-1 - n for n in range(count)]
    return [offsets[i] for i in torch.randperm(case.B, generator=random).tolist()]
