# mypy: ignore-errors
"""advance and clear as one Triton kernel.

For every row b with slot p = s_offsets[b] in [0, P), whose window has n = length[p] of N places pending,

    advance:  length[p] = 0 where n = N and accepted[b] > 0, else n + accepted[b]
    clear:    start[p] = (start[p] + n + accepted[b]) % N and length[p] = 0, where n + accepted[b] + room > N

clear has accepted = 0 and does nothing else; advance does so first, with room = 0 if none is asked for. In both
start and length are first brought into their ranges, and accepted[b] into 0 ... N - n. start, length [P], s_offsets
and accepted [B], all contiguous.

One program owns `BLOCK_B` rows, one thread a row. Nothing races: a slot's cursors are written by the thread that read
them.

Batch, pool, places, counts, room, and which of the two it is, are run-time values.
"""

from __future__ import annotations

import triton
import triton.language as tl

from la_triton.kernel_parts import count_of_row, ring_cursors


@triton.jit
def cursors_kernel(
    p_offsets,  # [B]
    p_start,  # [P] int32
    p_length,  # [P] int32
    p_counts,  # [B], or anything without HAS_COUNTS
    accepted,  # of every row, without HAS_COUNTS
    room,
    clear,  # 1, or 0 for advance
    B,
    P,
    N,
    HAS_COUNTS: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """The module says what it computes; letters and shapes are those of the parameters above."""
    o_b = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    in_batch = o_b < B
    row = tl.minimum(o_b, B - 1)
    slot = tl.load(p_offsets + row).to(tl.int64)
    live = (slot >= 0) & (slot < P) & in_batch
    start, n = ring_cursors(p_start, p_length, slot, live, N, FENCE=False)
    # One more than fits a full window, where it says that `decode` has emptied it.
    counted = n + count_of_row(p_counts, row, accepted, tl.maximum(N - n, 1), HAS_COUNTS)
    count = tl.minimum(counted, N)
    end = start + count
    cleared = count + room > N
    tl.store(p_start + slot, tl.where(end >= N, end - N, end), mask=live & cleared)
    length = tl.where(cleared | (counted > N), 0, count)
    tl.store(p_length + slot, length, mask=live & (count > tl.where(clear != 0, N - room, -1)))
