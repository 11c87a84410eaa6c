"""Judging a call: values against the truth per (row, head), and bits of everything that must not change."""

from __future__ import annotations

from collections.abc import Iterator

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
        yield from _value_errors("out", live, got[live], truth.out[live], truth.out_magnitude[live], tolerance)


def state_errors(
    s: torch.Tensor, s_offsets: torch.Tensor, truth: DecodeTruth, decay_scales: torch.Tensor
) -> Iterator[str]:
    """A sentence for every way in which the named slots of `s` [P*H, V, K] are wrong after the call."""
    live = sorted(truth.states)
    if not live:
        return
    H = decay_scales.shape[0]
    offsets = s_offsets.tolist()
    got = torch.stack([s[offsets[b] * H : (offsets[b] + 1) * H].detach().cpu().double() for b in live])
    yield from _value_errors(
        "state",
        live,
        got,
        torch.stack([truth.states[b] for b in live]),
        torch.stack([truth.state_magnitude[b] for b in live]),
        state_tolerance(s.dtype, decay_scales),
    )


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


def _value_errors(
    what: str, rows: list[int], got: torch.Tensor, truth: torch.Tensor, magnitude: torch.Tensor, tolerance: Tolerance
) -> Iterator[str]:
    """`got`, `truth`, `magnitude` [rows, H, ...] in float64."""
    got, truth, magnitude = (t.flatten(2) for t in (got, truth, magnitude))
    error = (got - truth).norm(dim=2)
    allowed = tolerance.allowed(truth.norm(dim=2), magnitude.norm(dim=2), got.shape[2])
    wrong = ~(error <= allowed)  # also true for NaN
    if not bool(wrong.any()):
        return
    ratio = torch.where(error.isnan(), torch.inf, error / allowed)
    row, head = divmod(int(ratio.argmax()), got.shape[1])
    difference = (got[row, head] - truth[row, head]).abs().nan_to_num(nan=torch.inf)
    element = int(difference.argmax())
    yield (
        f"{what} of {int(wrong.sum())} of {wrong.numel()} (row, head) is off; worst in row {rows[row]}, head {head}: "
        f"relative L2 error {(error / truth.norm(dim=2))[row, head]:.3g}, {ratio[row, head]:.3g} times the allowance; "
        f"at flat index {element} it is {got[row, head, element]:.6g} instead of {truth[row, head, element]:.6g}"
    )


def _worst(got: torch.Tensor, truth: torch.Tensor, dims: int = 1) -> float:
    got, truth = got.flatten(-dims), truth.flatten(-dims)
    relative = (got - truth).norm(dim=-1) / truth.norm(dim=-1).clamp_min(torch.finfo(torch.float64).tiny)
    return float(relative.nan_to_num(nan=torch.inf).max())


def _bits(value: torch.Tensor) -> torch.Tensor:
    value = value.detach()
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[value.element_size()]
    return value.view(integer) if value.dtype.is_floating_point else value
