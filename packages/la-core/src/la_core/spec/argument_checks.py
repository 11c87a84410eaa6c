"""Checks of single arguments, shared by all operators; all speak in one sentence.

The sentence is `<op>: <argument> <rule>; got <what came>. <what to do>`.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any

import torch

from la_core.spec.errors import SpecViolation


def violation(op: str, rule: str, came: str, remedy: str) -> SpecViolation:
    """The exception for a broken rule, in the sentence all operators use."""
    return SpecViolation(f"{op}: {rule}; got {came}. {remedy}")


def show_shape(shape: Sequence[int]) -> str:
    """`(6, 8)` for a shape, also for one dimension."""
    return f"({', '.join(str(n) for n in shape)})"


def show_dtype(dtype: torch.dtype) -> str:
    """`bfloat16` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def show_dtypes(dtypes: Sequence[torch.dtype]) -> str:
    """`bfloat16, float16 or float32` for a list of dtypes."""
    names = [show_dtype(dtype) for dtype in dtypes]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


WRITTEN = ("s", "out", "window.k", "window.v", "window.start", "window.length")
"""Arguments that are written: a copy of one would take the result away from the caller."""


def _own_or(name: str, how: str, remedy: str) -> str:
    """The remedy, but for a written argument the advice to allocate it rightly instead of passing a copy."""
    return f"Allocate {name} {how}; a copy would lose the update." if name in WRITTEN else remedy


def check_tensor(op: str, name: str, value: Any, axes: str) -> None:
    """`value` is a dense torch tensor whose memory holds its values."""
    if not isinstance(value, torch.Tensor):
        raise violation(
            op,
            f"{name} must be a torch.Tensor {axes}",
            "None" if value is None else f"a {type(value).__name__}",
            "Pass a tensor.",
        )
    if value.layout is not torch.strided:
        layout = str(value.layout).removeprefix("torch.")
        remedy = _own_or(name, "as a dense tensor", f"Pass {name}.to_dense().")
        raise violation(op, f"{name} must be a dense tensor {axes}", f"layout {layout}", remedy)
    if value.is_neg():
        raise violation(
            op,
            f"{name} must hold its own values",
            "a lazily negated view, whose memory has the opposite sign",
            _own_or(name, "without negation", f"Pass {name}.resolve_neg()."),
        )


def check_rank(op: str, name: str, value: torch.Tensor, axes: str, rank: int, remedy: str | None = None) -> None:
    """`value` has `rank` dimensions, named by `axes`."""
    if value.ndim != rank:
        raise violation(
            op,
            f"{name} must be {rank}-D {axes}",
            f"{value.ndim}-D {show_shape(value.shape)}",
            remedy or f"Pass a {rank}-D tensor or view.",
        )


def check_shape(op: str, name: str, value: torch.Tensor, axes: str, expected: Sequence[int], why: str) -> None:
    """`value` has exactly the `expected` shape; `why` says where the sizes come from."""
    if tuple(value.shape) != tuple(expected):
        raise violation(
            op,
            f"{name} must be {axes} = {show_shape(expected)}, {why}",
            show_shape(value.shape),
            f"Pass {name} of that shape.",
        )


def check_dtype(op: str, name: str, value: torch.Tensor, allowed: Sequence[torch.dtype], remedy: str) -> None:
    """`value` has one of the `allowed` dtypes."""
    if value.dtype not in allowed:
        raise violation(op, f"{name} must be {show_dtypes(allowed)}", show_dtype(value.dtype), remedy)


def check_same_device(op: str, name: str, value: torch.Tensor, device: torch.device, owner: str = "q") -> None:
    """`value` lies on the device of the argument `owner`."""
    if value.device != device:
        raise violation(
            op,
            f"{name} must be on {device}, the device of {owner}",
            str(value.device),
            _own_or(name, f"on {device}", f"Pass {name}.to('{device}')."),
        )


def check_last_stride(op: str, name: str, value: torch.Tensor, axes: str) -> None:
    """The last dimension of `value` is contiguous; a dimension of size 1 has no stride that matters."""
    if value.numel() > 0 and value.shape[-1] > 1 and value.stride(-1) != 1:
        raise violation(
            op,
            f"the last dimension of {name} {axes} must have stride 1",
            f"strides {show_shape(value.stride())}",
            _own_or(name, "so", f"Pass {name}.contiguous(); the other strides are free."),
        )


def check_contiguous(op: str, name: str, value: torch.Tensor, axes: str) -> None:
    """`value` is contiguous."""
    if not value.is_contiguous():
        raise violation(
            op,
            f"{name} {axes} must be contiguous",
            f"strides {show_shape(value.stride())}",
            _own_or(name, "so", f"Pass {name}.contiguous()."),
        )


def check_no_grad(op: str, name: str, value: torch.Tensor) -> None:
    """Autograd does not see what the operators do, so a tensor that wants gradients is refused."""
    if value.requires_grad and torch.is_grad_enabled():
        raise violation(
            op,
            f"{name} must not require grad: the operator is for inference only",
            "requires_grad=True while grad mode is on",
            f"Call under torch.no_grad() or pass {name}.detach().",
        )


def check_number(op: str, name: str, value: Any) -> float:
    """A real Python number as a float; a bool or a tensor is refused (reading a tensor would synchronise)."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise violation(
            op,
            f"{name} must be a real number or None",
            f"a {type(value).__name__}",
            f"Pass a Python float, for example {name}=0.125.",
        )
    try:
        return float(value)
    except OverflowError:
        raise violation(op, f"{name} must fit a float", f"{str(value)[:20]}..", "Pass a smaller number.") from None


def check_optional_bool(op: str, name: str, value: Any) -> None:
    """True, False or None."""
    if value is not None and not isinstance(value, bool):
        raise violation(op, f"{name} must be True, False or None", f"{value!r}", f"Leave {name} out for the default.")
