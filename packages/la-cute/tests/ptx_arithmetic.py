"""What PTX instructions compute, on arrays with one value a thread.

Exact to the bit, but for `ex2.approx`, which is rounded correctly here and to 2 units on a GPU.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

NUMPY = {
    kind: np.dtype(held)
    for held, kinds in (
        *(("bool", "pred"), ("u1", "b8"), ("u2", "b16 u16 bf16"), ("u4", "b32 u32"), ("u8", "b64 u64")),
        *(("i4", "s32"), ("i8", "s64"), ("f2", "f16"), ("f4", "f32")),
    )
    for kind in kinds.split()
}
"""How a value of a type is held; bfloat16, which numpy does not have, as its bits."""


def _sum_to_odd(a: Array, b: Array, c: Array) -> Array:
    """`a * b + c` of floats of 24 bits, in 53 bits, the last one set if it is not exact.

    Rounded again to 24 bits, in any direction, it gives what one rounding of the exact sum gives.
    """
    product, c = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + c
    back = total - product
    error = (product - (total - back)) + (c - back)
    bits = total.view(np.int64).copy()
    uneven = np.isfinite(total) & (error != 0) & (bits & 1 == 0)
    bits[uneven] += np.where((error > 0) == (total > 0), 1, -1)[uneven]
    odd: Array = bits.view(np.float64)
    return odd


def _fma(a: Array, b: Array, c: Array) -> Array:
    return _sum_to_odd(a, b, c).astype(np.float32)


def _fma_down(a: Array, b: Array, c: Array) -> Array:
    exact = _sum_to_odd(a, b, c)
    near = exact.astype(np.float32)
    return np.where(near > exact, np.nextafter(near, np.float32(-np.inf)), near)


def _exp2(x: Array) -> Array:
    """Subnormal numbers are zero, before and after."""
    tiny = np.finfo(np.float32).tiny
    power = np.exp2(np.where(np.abs(x) < tiny, 0, x).astype(np.float64)).astype(np.float32)
    return np.where(power < tiny, np.float32(0), power)


def _from_bf16(x: Array) -> Array:
    widened: Array = (x.astype(np.uint32) << 16).view(np.float32)
    return widened


def _to_bf16(x: Array) -> Array:
    """To nearest even."""
    bits = x.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint16)


def _to_f16(x: Array) -> Array:
    """To nearest even."""
    return np.where(np.isnan(x), np.uint16(0x7FFF), x.astype(np.float16).view(np.uint16))


def _pair(high: Array, low: Array) -> Array:
    both: Array = high.astype(np.uint32) << 16 | low
    return both


def _shift(shift: Callable[..., Array]) -> Callable[[Array, Array], Array]:
    """A shift that leaves nothing where it goes by more than there are bits."""

    def shifted(x: Array, by: Array) -> Array:
        bits = 8 * x.itemsize
        return np.where(by < bits, shift(x, np.minimum(by, bits - 1).astype(x.dtype)), 0)

    return shifted


def _shift_down(x: Array, by: Array) -> Array:
    """Shift to the right; a sign fills what comes in."""
    shifted: Array = np.right_shift(x, np.minimum(by, 8 * x.itemsize - 1).astype(x.dtype))
    return shifted


def _select(first: Array, second: Array, choice: Array) -> Array:
    return np.where(choice, first, second)


_COMPARED = {
    **dict.fromkeys(("eq", "ne"), "b16 b32 u32 s32 s64"),
    **dict.fromkeys(("lt", "le", "gt", "ge"), "u32 s32 s64"),
}
"""Ways to compare, named as the functions of `operator`, and the types that they know."""

ARITHMETIC: dict[str, tuple[str, Callable[..., Array]]] = {
    "add.f32": ("f32 f32 f32", np.add),
    "mul.f32": ("f32 f32 f32", np.multiply),
    "neg.f32": ("f32 f32", np.negative),
    "neg.s32": ("s32 s32", np.negative),
    "neg.s64": ("s64 s64", np.negative),
    "sub.s64": ("s64 s64 s64", np.subtract),
    "fma.rn.f32": ("f32 f32 f32 f32", _fma),
    "fma.rn.f32.f16": ("f32 f16 f16 f32", _fma),
    "fma.rn.f32.bf16": ("f32 bf16 bf16 f32", lambda a, b, c: _fma(_from_bf16(a), _from_bf16(b), c)),
    "fma.rm.f32": ("f32 f32 f32 f32", _fma_down),
    "cvt.sat.f32.f32": ("f32 f32", lambda x: np.clip(np.nan_to_num(x, nan=0), 0, 1)),
    "ex2.approx.ftz.f32": ("f32 f32", _exp2),
    "cvt.f32.bf16": ("f32 bf16", _from_bf16),
    "cvt.f32.f16": ("f32 f16", lambda x: x),
    "cvt.rn.bf16.f32": ("bf16 f32", _to_bf16),
    "cvt.rn.f16.f32": ("b16 f32", _to_f16),
    "cvt.rn.bf16x2.f32": ("b32 f32 f32", lambda high, low: _pair(_to_bf16(high), _to_bf16(low))),
    "cvt.rn.f16x2.f32": ("b32 f32 f32", lambda high, low: _pair(_to_f16(high), _to_f16(low))),
    "cvt.u16.u32": ("u16 u32", lambda x: x.astype(np.uint16)),
    "cvt.u32.u16": ("u32 u16", lambda x: x),
    "cvt.u64.u32": ("u64 u32", lambda x: x),
    "cvt.s64.s32": ("s64 s32", lambda x: x),
    "add.s32": ("s32 s32 s32", np.add),
    "add.s64": ("s64 s64 s64", np.add),
    "sub.s32": ("s32 s32 s32", np.subtract),
    "mul.lo.s64": ("s64 s64 s64", np.multiply),
    "mad.lo.s64": ("s64 s64 s64 s64", lambda a, b, c: a * b + c),
    "mul.wide.u16": ("u32 u16 u16", lambda a, b: a.astype(np.uint32) * b),
    "mul.wide.u32": ("u64 u32 u32", lambda a, b: a.astype(np.uint64) * b),
    "mul.wide.s32": ("s64 s32 s32", lambda a, b: a.astype(np.int64) * b),
    "mul.hi.u32": ("u32 u32 u32", lambda a, b: a.astype(np.uint64) * b >> np.uint64(32)),
    "shl.b32": ("b32 b32 u32", _shift(np.left_shift)),
    "shl.b64": ("b64 b64 u32", _shift(np.left_shift)),
    "shr.u16": ("u16 u16 u32", _shift(np.right_shift)),
    "shr.u32": ("u32 u32 u32", _shift(np.right_shift)),
    "shr.u64": ("u64 u64 u32", _shift(np.right_shift)),
    "shr.s32": ("s32 s32 u32", _shift_down),
    "rem.s32": ("s32 s32 s32", np.fmod),
    "min.s32": ("s32 s32 s32", np.minimum),
    "max.s32": ("s32 s32 s32", np.maximum),
    "min.u32": ("u32 u32 u32", np.minimum),
    "max.u32": ("u32 u32 u32", np.maximum),
    "min.s64": ("s64 s64 s64", np.minimum),
    "max.s64": ("s64 s64 s64", np.maximum),
    "mul.lo.s32": ("s32 s32 s32", np.multiply),
    "mad.lo.s32": ("s32 s32 s32 s32", lambda a, b, c: a * b + c),
    "cvt.rn.f32.s32": ("f32 s32", lambda x: x.astype(np.float32)),
    "cvt.rn.f32.u32": ("f32 u32", lambda x: x.astype(np.float32)),
    "cvt.u32.u64": ("u32 u64", lambda x: x.astype(np.uint32)),
    "not.b32": ("b32 b32", np.bitwise_not),
    "and.b16": ("b16 b16 b16", np.bitwise_and),
    "and.b32": ("b32 b32 b32", np.bitwise_and),
    "and.b64": ("b64 b64 b64", np.bitwise_and),
    "xor.b32": ("b32 b32 b32", np.bitwise_xor),
    "or.b32": ("b32 b32 b32", np.bitwise_or),
    "or.b64": ("b64 b64 b64", np.bitwise_or),
    "or.pred": ("pred pred pred", np.logical_or),
    "and.pred": ("pred pred pred", np.logical_and),
    "not.pred": ("pred pred", np.logical_not),
    "selp.b16": ("b16 b16 b16 pred", _select),
    "selp.b32": ("b32 b32 b32 pred", _select),
    "selp.b64": ("b64 b64 b64 pred", _select),
    "selp.f32": ("f32 f32 f32 pred", _select),
    "setp.neu.f32": ("pred f32 f32", operator.ne),
    **{
        f"setp.{name}.{kind}": (f"pred {kind} {kind}", getattr(operator, name))
        for name, kinds in _COMPARED.items()
        for kind in kinds.split()
    },
}
"""What sets a register from registers: the types of the result and of the sources, and the function."""
