# mypy: ignore-errors
"""fold, commit and commit_layers as one Triton kernel.

Computes, for every layer l, every row b with slot p = s_offsets[b] in [0, P), whose window has n = length[p] of N
places pending, with c = n + accepted[b] > 0 tokens to bring in and c + room > N, and every head h of group
g = h // (H // G),

    S'[v,k] = exp(-d*c) * S[v,k] + sum_i exp(-d*(c-1-i)) * v_i[v] k_i[k]      S = s[l, p*H + h], replaced by S'

where i = 0 ... c-1 are the tokens at the places (start[p] + i) % N of layer l. States of other rows are neither read
nor written. Pool [L, P*H, V, K], slopes [L, H], window k [L, P, N, G, K] and v [L, P, N, H, V]; strides as in
`window_decode_kernel`.

One program owns `BLOCK_V` rows of V of one (layer, row, head): it loads them once and stores them once.

Nothing races. Windows and cursors are read only. A part of a state is read and written by the program that owns it.

Limits as in `window_decode_kernel`; L, counts and room are run-time values as well.
"""

from __future__ import annotations

import triton
import triton.language as tl

from la_triton.kernel_parts import bring_in, count_of_row, key_axis, live_row, ring_cursors, state_tile, store_rounded


@triton.jit
def commit_kernel(
    p_s,  # [L, P*H, V, K]
    p_offsets,  # [B]
    p_decay,  # [L, H] float32
    p_wk,  # [L, P, N, G, K]
    p_wv,  # [L, P, N, H, V]
    p_start,  # [P] int32
    p_length,  # [P] int32
    p_counts,  # [B], or anything without HAS_COUNTS
    accepted,  # of every row, without HAS_COUNTS
    room,
    B,
    P,
    N,
    H,
    group,  # H // G
    wk_layer,
    wk_slot,
    wk_place,
    wk_head,
    wv_layer,
    wv_slot,
    wv_place,
    wv_head,
    s_layer,
    s_row,
    NEVER,  # -1, which no index is
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,  # K, rounded up to a power of two
    INNER_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    K_CONTIGUOUS: tl.constexpr,
    ALIGNED: tl.constexpr,  # rows of states and windows start at multiples of 16 bytes
    HAS_COUNTS: tl.constexpr,
    LOAD_EVICTION: tl.constexpr,  # priority of states in the L2 cache as they are read, and as they are written
    STORE_EVICTION: tl.constexpr,
    EMULATE_ROUNDING: tl.constexpr,
    ROWS_PER_Z: tl.constexpr,
    WINDOW_PIECE: tl.constexpr,  # bytes of 4 elements of the window
    STEP: tl.constexpr,  # tokens brought in at a time
):
    """The module says what it computes; letters and shapes are those of the parameters above."""
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    i_v = tl.program_id(0) % BLOCKS
    i_lh = tl.program_id(0) // BLOCKS
    i_h = (i_lh % H).to(tl.int64)
    i_l = (i_lh // H).to(tl.int64)
    i_b = tl.program_id(1) + tl.program_id(2) * ROWS_PER_Z
    row, slot, live, _ = live_row(p_offsets, i_b, B, P)
    start, n = ring_cursors(p_start, p_length, slot, live, N, FENCE=False)
    count = n + count_of_row(p_counts, row, accepted, N - n, HAS_COUNTS)
    count = tl.where(live & (count + room > N), count, 0)
    p_S, m_S = state_tile(
        p_s + i_l * s_layer + (slot * H + i_h) * s_row,
        i_v,
        count > 0,
        NEVER,
        K,
        V,
        BLOCK_K,
        INNER_K,
        BLOCK_V,
        K_CONTIGUOUS,
        ALIGNED,
    )
    b_S = tl.load(p_S, mask=m_S, other=0.0, eviction_policy=LOAD_EVICTION).to(tl.float32)
    decay = tl.load(p_decay + i_lh)
    o_K, m_K = key_axis(NEVER, K, BLOCK_K, INNER_K, ALIGNED)
    o_V = i_v * BLOCK_V + tl.arange(0, BLOCK_V)[None, :, None]
    b_S = bring_in(
        tl.exp(-decay * count) * b_S,
        p_wk + i_l * wk_layer + slot * wk_slot + (i_h // group) * wk_head + o_K,
        m_K,
        p_wv + i_l * wv_layer + slot * wv_slot + i_h * wv_head + o_V,
        o_V < V,
        wk_place,
        wv_place,
        start,
        count,
        count - 1,
        decay,
        N,
        WINDOW_PIECE,
        STEP,
    )
    store_rounded(p_S, b_S, m_S, STORE_EVICTION, EMULATE_ROUNDING)
