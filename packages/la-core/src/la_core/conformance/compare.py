"""Judging a call: values against the truth per (row, head), and bits of everything that must not change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from la_core.conformance.decode_truth import DecodeTruth
from la_core.conformance.tolerances import Tolerance, out_tolerance, state_tolerance

Worst = tuple[float, str]
"""A relative L2 error and where it is."""


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """True if both hold the same bits; NaN equals itself and 0 differs from -0."""
    return first.shape == second.shape and torch.equal(_bits(first), _bits(second))


def first_difference(first: torch.Tensor, second: torch.Tensor) -> str:
    """The first index whose bits differ and both values, for messages."""
    where = (_bits(first) != _bits(second)).nonzero()
    index = tuple(where[0].tolist())
    return f"{len(where)} values differ, first at {list(index)}: {first[index].item()} became {second[index].item()}"


def out_errors(out: torch.Tensor, truth: DecodeTruth, decay_scales: torch.Tensor, k_size: int) -> Iterator[str]:
    """A sentence for every way in which `out` [B, H, V] is wrong; none for a right one."""
    got = out.detach().cpu().double()
    padding = [b for b in range(got.shape[0]) if b not in truth.states]
    if padding and not bool((got[padding] == 0).all()):
        b = next(b for b in padding if not bool((got[b] == 0).all()))
        yield f"out of padding row {b} must be zero, is {got[b].flatten()[:4].tolist()} ..."
    live = sorted(truth.states)
    if live:
        tolerance = out_tolerance(out.dtype, k_size, decay_scales)
        rows = (
            (f"row {b}", got[b], truth.out[b], _allowed(tolerance, truth.out[b], truth.out_magnitude[b])) for b in live
        )
        yield from value_errors("out", rows)


def state_errors(
    s: torch.Tensor, s_offsets: torch.Tensor, truth: DecodeTruth, decay_scales: torch.Tensor
) -> Iterator[str]:
    """A sentence for every way in which the named slots of `s` [P*H, V, K] are wrong after the call."""
    live = sorted(truth.states)
    if not live:
        return
    H = decay_scales.shape[0]
    offsets = s_offsets.tolist()
    tolerance = state_tolerance(s.dtype, decay_scales)
    rows = (
        (
            f"row {b}",
            s[offsets[b] * H : (offsets[b] + 1) * H].detach().cpu().double(),
            truth.states[b],
            _allowed(tolerance, truth.states[b], truth.state_magnitude[b]),
        )
        for b in live
    )
    yield from value_errors("state", rows)


def worst_out_error(out: torch.Tensor, truth: DecodeTruth) -> float:
    """Largest relative L2 error of `out` over live (row, head); 0 without live rows."""
    live = sorted(truth.states)
    return _worst(out.detach().cpu().double()[live], truth.out[live]) if live else 0.0


def worst_state_error(s: torch.Tensor, s_offsets: torch.Tensor, truth: DecodeTruth) -> float:
    """Largest relative L2 error of a new state over live (row, head); 0 without live rows."""
    worst = 0.0
    offsets = s_offsets.tolist()
    for b, states in truth.states.items():
        H = states.shape[0]
        worst = max(worst, _worst(s[offsets[b] * H : (offsets[b] + 1) * H].detach().cpu().double(), states, dims=2))
    return worst


JudgedRow = tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]
"""A row's name, and what it got and its truth [H, ...] and the allowed error [H], in float64."""


def value_errors(what: str, rows: Iterable[JudgedRow]) -> Iterator[str]:
    """One sentence about the worst (row, head), if any is off; rows are looked at one by one to bound memory."""
    total = wrong = 0
    worst, sentence = 0.0, ""
    for row, got, truth, allowed in rows:
        got, truth = got.flatten(1), truth.flatten(1)
        error, norm = (got - truth).norm(dim=1), truth.norm(dim=1)
        off = ~(error <= allowed)  # also true for NaN
        total += off.numel()
        wrong += int(off.sum())
        # An allowance of 0 makes 0 / 0 of a right head: only heads that are off compete.
        ratio = torch.where(off, (error / allowed).nan_to_num(nan=torch.inf), 0.0)
        head = int(ratio.argmax())
        if float(ratio[head]) > worst:
            worst = float(ratio[head])
            element = int((got[head] - truth[head]).abs().nan_to_num(nan=torch.inf).argmax())
            sentence = (
                f"worst in {row}, head {head}: relative L2 error {error[head] / norm[head]:.3g}, {worst:.3g} times "
                f"the allowance; at flat index {element} it is {got[head, element]:.6g} instead of "
                f"{truth[head, element]:.6g}"
            )
    if wrong:
        yield f"{what} of {wrong} of {total} (row, head) is off; {sentence}"


def _allowed(tolerance: Tolerance, truth: torch.Tensor, magnitude: torch.Tensor) -> torch.Tensor:
    """The allowance of each head for values [H, ...]."""
    truth, magnitude = truth.flatten(1), magnitude.flatten(1)
    return tolerance.allowed(truth.norm(dim=1), magnitude.norm(dim=1), truth.shape[1])


def _worst(got: torch.Tensor, truth: torch.Tensor, dims: int = 1) -> float:
    got, truth = got.flatten(-dims), truth.flatten(-dims)
    relative = (got - truth).norm(dim=-1) / truth.norm(dim=-1).clamp_min(torch.finfo(torch.float64).tiny)
    return float(relative.nan_to_num(nan=torch.inf).max())


def _bits(value: torch.Tensor) -> torch.Tensor:
    value = value.detach()
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[value.element_size()]
    return value.view(integer) if value.dtype.is_floating_point else value
