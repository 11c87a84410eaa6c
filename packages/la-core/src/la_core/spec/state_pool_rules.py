"""The rules of a state pool: its axes and strides, which offsets are legal, and what may share memory.

A pool `s` is `[P*H, V, K]`: `P` slots of `H` heads, each a dense `V x K` matrix. Slot `p` is the rows
`p*H ... p*H + H-1`. A matrix is stored with `K` contiguous (layout `"vk"`) or with `V` contiguous (`"kv"`, a
transposed view of `[.., K, V]` memory). The stride between rows is free as long as rows do not overlap.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from la_core.spec.argument_checks import check_rank, show_shape, violation
from la_core.spec.decode_problem import StateLayout


def check_pool_rank(op: str, s: torch.Tensor) -> None:
    """`s` is 3-D; for a 4-D pool the sentence shows the view that flattens it, or says that none exists."""
    if s.ndim == 4:
        slots, heads, v_size, k_size = s.shape
        try:
            s.view(slots * heads, v_size, k_size)
            remedy = f"Pass s.view({slots * heads}, {v_size}, {k_size})."
        except RuntimeError:
            remedy = (
                f"No view flattens strides {show_shape(s.stride())}, and a copy would lose the update: "
                "allocate the pool so that slots and heads have one common stride."
            )
    else:
        remedy = "Pass the pool as [P*H, V, K]."
    check_rank(op, "s", s, "[P*H, V, K]", 3, remedy)


def pool_layout(op: str, s: torch.Tensor) -> StateLayout:
    """`"vk"` or `"kv"` for a legal 3-D pool, else the refusal of its strides."""
    rows, v_size, k_size = s.shape
    if rows == 0:
        return "vk"
    row_stride, v_stride, k_stride = s.stride()
    # The stride of a dimension of size 1 is never used, so it never decides.
    if (k_size == 1 or k_stride == 1) and (v_size == 1 or v_stride == k_size):
        layout: StateLayout = "vk"
    elif (v_size == 1 or v_stride == 1) and (k_size == 1 or k_stride == v_size):
        layout = "kv"
    else:
        raise violation(
            op,
            "each state of s [P*H, V, K] must be dense, with K contiguous or with V contiguous",
            f"shape {show_shape(s.shape)} with strides {show_shape(s.stride())}",
            "Pass a pool allocated as [P*H, V, K], or pool.transpose(1, 2) of one allocated as [P*H, K, V].",
        )
    if rows > 1 and row_stride < v_size * k_size:
        raise violation(
            op,
            f"the rows of s [P*H, V, K] must not overlap: the row stride must be at least V*K = {v_size * k_size}",
            f"row stride {row_stride}",
            "Pass a pool with a state of its own for every row, not an expanded view.",
        )
    return layout


def check_offset_values(op: str, offsets: Sequence[int], slots: int) -> None:
    """Every offset is negative (padding) or names a slot of its own below `slots`."""
    outside = [(row, slot) for row, slot in enumerate(offsets) if slot >= slots]
    if outside:
        row, slot = outside[0]
        raise violation(
            op,
            f"s_offsets must be negative (padding) or below P = {slots}",
            f"slot {slot} in row {row}"
            + (f" and {len(outside) - 1} more, in rows {_show_rows(outside[1:])}" if len(outside) > 1 else ""),
            "Pass the slot that each row owns.",
        )
    owner: dict[int, int] = {}
    for row, slot in enumerate(offsets):
        if slot >= 0 and owner.setdefault(slot, row) != row:
            raise violation(
                op,
                "s_offsets must name each slot at most once",
                f"slot {slot} in rows {owner[slot]} and {row}",
                "Give every row its own slot; padding rows are negative.",
            )


def _show_rows(rows: Sequence[tuple[int, int]]) -> str:
    shown = ", ".join(str(row) for row, _ in rows[:8])
    return shown + (", ..." if len(rows) > 8 else "")


def byte_extent(shape: Sequence[int], stride: Sequence[int], item_size: int) -> int:
    """Bytes from the first element to the end of the last one; 0 for an empty tensor."""
    if 0 in shape:
        return 0
    return (sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) + 1) * item_size


def overlaps_itself(value: torch.Tensor) -> bool:
    """True if two elements of `value` share memory (an expanded view, or strides that interleave)."""
    if value.numel() < 2:
        return False
    dims = sorted((step, n) for n, step in zip(value.shape, value.stride(), strict=True) if n > 1)
    reach = 0
    for step, n in dims:
        if step <= reach:
            # Strides that are not nested can still be free of overlap; only counting decides.
            return bool((_element_offsets(value).sort().values.diff() == 0).any())
        reach += (n - 1) * step
    return False


def check_own_memory(op: str, name: str, value: torch.Tensor, axes: str) -> None:
    """A tensor that is written has memory of its own for every element."""
    if overlaps_itself(value):
        raise violation(
            op,
            f"{name} {axes} must have memory of its own for every element",
            f"shape {show_shape(value.shape)} with strides {show_shape(value.stride())}, which overlap",
            "Pass a tensor that is not an expanded view.",
        )


def share_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    """True if some byte belongs to an element of both tensors. Exact also for interleaved views of one buffer."""
    if first.numel() == 0 or second.numel() == 0:
        return False
    layout = (first.shape, first.stride(), first.element_size())
    other = (second.shape, second.stride(), second.element_size())
    distance = second.data_ptr() - first.data_ptr()
    if byte_extent(*layout) <= distance or byte_extent(*other) <= -distance:
        return False
    return _layouts_meet(layout, other, distance)


_Layout = tuple[tuple[int, ...], tuple[int, ...], int]
"""Shape, strides and bytes of an element."""


@functools.lru_cache(maxsize=256)
def _layouts_meet(first: _Layout, second: _Layout, distance: int) -> bool:
    """True if some byte belongs to both when `second` starts `distance` bytes behind `first`.

    Remembered, as it takes up to milliseconds: the k and v of a window in one buffer meet their like in every call.
    """
    runs, length = _byte_runs(*first, max(-distance, 0))
    other_runs, other_length = _byte_runs(*second, max(distance, 0))
    # Runs are disjoint within each tensor's sorted list up to duplicates: the nearest run that starts before the
    # other's end is the only one that can reach into it.
    nearest = torch.searchsorted(runs, other_runs + other_length, right=False) - 1
    return bool(((nearest >= 0) & (runs[nearest.clamp_min(0)] + length > other_runs)).any())


def _byte_runs(shape: Sequence[int], stride: Sequence[int], size: int, base: int) -> tuple[torch.Tensor, int]:
    """Sorted start bytes of the contiguous runs of a layout that starts at `base`, and their common length in bytes."""
    length = 1
    dims = sorted((step, n) for n, step in zip(shape, stride, strict=True) if n > 1)
    while dims and dims[0][0] == length:
        length *= dims.pop(0)[1]
    starts = _grid([n for _, n in dims], [step for step, _ in dims])
    return starts.mul_(size).add_(base).sort().values, length * size


def _element_offsets(value: torch.Tensor) -> torch.Tensor:
    return _grid(value.shape, value.stride())


def _grid(shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    offsets = torch.zeros(1, dtype=torch.int64)
    for n, step in zip(shape, stride, strict=True):
        offsets = (offsets[:, None] + torch.arange(n, dtype=torch.int64) * step).flatten()
    return offsets


def check_no_shared_memory(op: str, tensors: dict[str, torch.Tensor], written: Sequence[str] = ("out", "s")) -> None:
    """What is written shares no memory with any other argument."""
    done: set[str] = set()
    for first in filter(tensors.__contains__, written):
        done.add(first)
        for second in tensors:
            if second not in done and share_memory(tensors[first], tensors[second]):
                raise violation(
                    op,
                    f"{first} is written and must not overlap {second}",
                    f"{first} and {second} sharing memory",
                    f"Pass {first} with memory of its own.",
                )
