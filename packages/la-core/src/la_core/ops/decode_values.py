"""Checks of what may differ between calls with the same facts: addresses, offset values, options."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from la_core.spec.argument_checks import (
    check_no_grad,
    check_number,
    check_optional_bool,
    check_same_device,
    check_tensor,
    violation,
)
from la_core.spec.decode_problem import DecodeProblem
from la_core.spec.state_pool_rules import check_no_shared_memory, check_offset_values

ENV_CHECK_OFFSETS = os.environ.get("LA_CHECK_OFFSETS", "") not in ("", "0")
"""Whether offset values on a GPU are checked by default, at the price of a synchronisation. Read once at import."""

TENSORS = ("q", "k", "v", "s", "s_offsets", "decay_scales", "out")
"""Names of the tensor arguments in the order in which they are passed around."""

MAX_LAYOUTS = 64
"""Arrangements in memory that are remembered as free of overlap, for each set of facts."""


def check_values(
    problem: DecodeProblem, tensors: Sequence[torch.Tensor], softmax_scale: object, check_offsets: bool | None
) -> None:
    """Every check of this module at once, for a call whose facts are new."""
    if problem.device.type != "meta":
        check_memory(tensors, set())
    if problem.device.type == "cpu":
        check_offset_values("decode", tensors[4].tolist(), problem.P)
    elif problem.device.type == "cuda" and (check_offsets or (ENV_CHECK_OFFSETS and check_offsets is None)):
        check_offsets_on_gpu(tensors[4], problem.P, explicit=bool(check_offsets))
    if softmax_scale is not None:
        check_number("decode", "softmax_scale", softmax_scale)


def check_memory(tensors: Sequence[torch.Tensor], known: set[tuple[int, ...]]) -> None:
    """What is written shares no memory with anything else. For tensors whose ranges of addresses meet, which is rare.

    `known` remembers arrangements that were found legal: distances between addresses, under one set of facts.
    """
    base = tensors[0].data_ptr()
    arrangement = tuple(t.data_ptr() - base for t in tensors)
    if arrangement in known:
        return
    check_no_shared_memory("decode", dict(zip(TENSORS, tensors, strict=False)))
    if len(known) >= MAX_LAYOUTS:
        known.clear()
    known.add(arrangement)


def check_offsets_on_gpu(s_offsets: torch.Tensor, slots: int, *, explicit: bool) -> None:
    """Read offsets back and check them. While a graph is captured, `explicit` is refused, a default passed over."""
    if may_read_back("decode", s_offsets.device, explicit=explicit):
        check_offset_values("decode", s_offsets.tolist(), slots)


def may_read_back(op: str, device: torch.device, *, explicit: bool) -> bool:
    """True if values on this GPU can be read: no graph is being captured. If one is, `explicit` is refused."""
    with torch.cuda.device(device):
        capturing = torch.cuda.is_current_stream_capturing()
    if capturing and explicit:
        raise violation(
            op,
            "check_offsets=True must read s_offsets back, which a CUDA graph capture forbids",
            "a call on a capturing stream",
            "Check before the capture, or leave check_offsets out.",
        )
    return not capturing


def check_traced(
    op: str,
    axes: dict[str, str],
    tensors: dict[str, torch.Tensor | None],
    softmax_scale: object,
    check_offsets: object,
    optional: Sequence[str] = ("out",),
) -> float | None:
    """What a compiled graph would not show to the operator in it: options, what is no tensor or on no real device,
    and tensors that require grad. Returns the scale as the operator takes it.

    The first of `tensors` says the device; the `optional` ones may be None.
    """
    check_optional_bool(op, "check_offsets", check_offsets)
    for name, value in tensors.items():
        # Only a call that this refuses goes there: the compiler cannot follow all that the check asks.
        if (value is not None or name not in optional) and not isinstance(value, torch.Tensor):
            check_tensor(op, name, value, axes[name])
    owner, first = next(iter(tensors.items()))
    for name, value in tensors.items():
        if value is not None:
            check_same_device(op, name, value, first.device, owner)  # type: ignore[union-attr]
            check_no_grad(op, name, value)
    return None if softmax_scale is None else check_number(op, "softmax_scale", softmax_scale)
