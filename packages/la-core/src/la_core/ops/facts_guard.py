"""One C call that says whether tensors still have the facts they were checked with.

Reading shape, strides, dtype, device and `requires_grad` of seven tensors from Python takes longer than launching a
kernel. torch ships the comparison as `TensorGuards`, the class behind an early form of `torch.compile`'s guards. It
is not a public interface, so it is used only after `_probe` has seen it tell apart every fact that the checks of a
call rest on; otherwise `make_guard` answers None and the caller compares facts in Python.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

Guard = Callable[..., bool]


def make_guard(tensors: Sequence[torch.Tensor]) -> Guard | None:
    """A function of as many tensors that is True only if each has type, layout, dtype, device, shape and strides of
    its counterpart now, and none requires grad. None if torch does not offer a sound one, or if one of the tensors
    requires grad: torch's guard compares the flag and not the grad mode, so it would accept them when that changes.

    The answer may be False for tensors that do match (in another inference mode, or the same tensor given twice).
    """
    return _build(tensors) if _probe() and not any(t.requires_grad for t in tensors) else None


def _build(tensors: Sequence[torch.Tensor]) -> Guard:
    from torch._C._dynamo.guards import TensorGuards

    sizes: list[Any] = [list(t.shape) for t in tensors]
    strides: list[Any] = [list(t.stride()) for t in tensors]
    guards = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    check: Guard = guards.check
    return check


@cache
def _probe() -> bool:
    """True if this torch's guard accepts what it was built from and rejects every change that matters here."""

    class Subclass(torch.Tensor):
        pass

    base = torch.zeros(4, 6, 8)
    changes = (
        torch.zeros(4, 6, 8, dtype=torch.bfloat16),
        torch.zeros(4, 6, 9),
        torch.zeros(3, 6, 8),
        torch.zeros(4, 48),
        torch.zeros(4, 6, 16)[:, :, ::2],
        torch.zeros(4, 8, 6).transpose(1, 2),
        torch.zeros(4, 6, 8, device="meta"),
        torch.zeros(4, 6, 8).requires_grad_(),
        torch._neg_view(base),
        base.to_sparse(),
        base.as_subclass(Subclass),
    )
    with torch.inference_mode(False), torch.enable_grad():
        try:
            accepts = _build([base, base.clone()])
            sound = accepts(base, base.clone()) is True and accepts(base.clone(), base) is True
            return sound and all(
                accepts(change, base) is False and accepts(base, change) is False for change in changes
            )
        except Exception:
            # A private interface may vanish or change its signature: any failure means that it is not used.
            return False
