# mypy: ignore-errors
"""What the kernels share: functions of the kernel language, inlined where they are called."""

from __future__ import annotations

import triton
import triton.language as tl

ROWS_PER_Z = 32768
"""Rows on the second axis of the grid, which holds at most 65,535 programs; the rest goes to the third."""


@triton.jit
def store_rounded(pointers, values, mask, EVICTION: tl.constexpr, EMULATE_ROUNDING: tl.constexpr):
    """Store float32 values in the pointers' dtype, rounded to nearest even."""
    dtype: tl.constexpr = pointers.dtype.element_ty
    if EMULATE_ROUNDING and dtype == tl.bfloat16:
        # The interpreter cuts float32 to bf16, so round before: add half a unit, and the lowest kept bit for ties.
        bits = values.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        values = tl.where(values == values, rounded.to(tl.float32, bitcast=True), values)
    tl.store(pointers, values.to(dtype), mask=mask, eviction_policy=EVICTION)


@triton.jit
def live_row(p_offsets, i_b, B, P):
    """The row of a program, its slot, and whether both exist. Limits instead of a branch: no load waits for one."""
    in_batch = i_b < B
    row = tl.minimum(i_b, B - 1).to(tl.int64)
    slot = tl.load(p_offsets + row).to(tl.int64)
    return row, slot, (slot >= 0) & (slot < P) & in_batch, in_batch


@triton.jit
def ring_cursors(p_start, p_length, slot, live, N, FENCE: tl.constexpr):
    """Place of the oldest pending token and their number, brought into their ranges; 0 and 0 for a padding row.

    With `FENCE` loads in front are issued first: left to itself, the assembler puts those of a state behind arithmetic
    on the cursors, which waits for them.
    """
    if FENCE:
        tl.debug_barrier()
    start = tl.load(p_start + slot, mask=live, other=0) % N
    length = tl.load(p_length + slot, mask=live, other=0)
    return tl.where(start < 0, start + N, start), tl.minimum(tl.maximum(length, 0), N)


@triton.jit
def count_of_row(p_counts, row, otherwise, most, HAS_COUNTS: tl.constexpr):
    """The row's count if there are counts, else the one number for all; limited to 0 ... `most`."""
    count = otherwise
    if HAS_COUNTS:
        # Limited in the counts' own dtype, where nothing is cut off.
        count = tl.minimum(tl.maximum(tl.load(p_counts + row), 0), 64).to(tl.int32)
    return tl.minimum(tl.maximum(count, 0), most)


@triton.jit
def state_tile(
    p_state,
    i_v,
    live,
    NEVER,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INNER_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    K_CONTIGUOUS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Addresses of the `i_v`-th `BLOCK_V` rows of a state, as [BLOCK_K / INNER_K, BLOCK_V, INNER_K], and a mask.

    With K contiguous, lanes lie along the last axis before they lie along V: sums over the first need no other lane.
    """
    l_v = tl.arange(0, BLOCK_V)[None, :, None]
    o_k = tl.arange(0, BLOCK_K // INNER_K)[:, None, None] * INNER_K + tl.arange(0, INNER_K)[None, None, :]
    o_v = i_v * BLOCK_V + l_v
    # The block's address first, then offsets known to be small: a thread's accesses differ by constants alone.
    if K_CONTIGUOUS:
        pointers = tl.multiple_of(p_state + i_v * BLOCK_V * K + (l_v * K + o_k), [1, 1, 16])
        mask = (o_v < tl.where(live, V, 0)) & (o_k >= 0)
        if not ALIGNED or K != BLOCK_K:
            mask = mask & (o_k < K)
        if not ALIGNED:
            # True for every element, but not known to be: accesses then go element by element.
            mask = mask & (o_k != NEVER)
    else:
        pointers = tl.multiple_of(p_state + i_v * BLOCK_V + (l_v + o_k * V), [1, 16, 1])
        mask = (o_k < tl.where(live, K, 0)) & (o_v >= 0)
        if not ALIGNED or V % BLOCK_V != 0:
            mask = mask & (o_v < V)
        if not ALIGNED:
            mask = mask & (o_v != NEVER)
    return pointers, mask


@triton.jit
def key_axis(NEVER, K: tl.constexpr, BLOCK_K: tl.constexpr, INNER_K: tl.constexpr, ALIGNED: tl.constexpr):
    """Offsets along K as a state's tile has them, [BLOCK_K / INNER_K, 1, INNER_K], and which exist."""
    o_k = tl.arange(0, BLOCK_K // INNER_K)[:, None, None] * INNER_K + tl.arange(0, INNER_K)[None, None, :]
    m_k = o_k < K
    if not ALIGNED:
        m_k = m_k & (o_k != NEVER)
    return o_k, m_k


@triton.jit
def if_left(mask, left):
    """The mask if `left` is more than 0, else nothing. A block is compared: the interpreter widens a flag to int32."""
    return mask & (tl.broadcast_to(left, mask.shape) > 0)


@triton.jit
def bring_in(
    b_S,  # [BLOCK_K / INNER_K, BLOCK_V, INNER_K]
    p_k,  # keys of a ring's first place, as `key_axis`
    m_k,
    p_v,  # values of a ring's first place, [1, BLOCK_V, 1]
    m_v,
    k_place,
    v_place,
    start,
    count,
    newest,
    decay,
    N,
    PIECE: tl.constexpr,  # bytes of 4 elements of the ring
    STEP: tl.constexpr,
):
    """Add the `count` tokens from place `start` on, the i-th times exp(-decay * (newest - i)).

    `STEP` at a time, whose loads are in flight together; those that are too many are masked.
    """
    for first in range(0, count, STEP):
        for step in tl.static_range(STEP):
            i = first + step
            place = start + i
            place = tl.where(place >= N, place - N, place).to(tl.int64)
            p_ik = tl.multiple_of(p_k + place * k_place, [1, 1, PIECE])
            b_k = tl.load(p_ik, mask=if_left(m_k, count - i), other=0.0)
            b_v = tl.load(p_v + place * v_place, mask=if_left(m_v, count - i), other=0.0)
            b_v = tl.exp(-decay * tl.maximum(newest - i, 0)) * b_v.to(tl.float32)
            b_S = tl.fma(tl.broadcast_to(b_v, b_S.shape), tl.broadcast_to(b_k.to(tl.float32), b_S.shape), b_S)
    return b_S
