# mypy: ignore-errors
"""decode with a window as one Triton kernel.

Computes, for every row b with slot p = s_offsets[b] in [0, P), whose window has n = length[p] of N places pending, and
head h of group g = h // (H // G), with k_i, v_i the pending tokens, oldest first,

    o[b,h,v] = scale * (exp(-d*(n+1)) * sum_k S[v,k] q[k] + sum_i exp(-d*(n-i)) * (k_i . q) * v_i[v] + (k . q) * v[v])
    window[p, (start[p] + n) % N] = k[b,g], v[b,h]

and where the window is full, n = N,

    S'[v,k] = exp(-d*(N+1)) * S[v,k] + sum_i exp(-d*(N-i)) * v_i[v] k_i[k] + v[v] k[k]
    o[b,h,v] = scale * sum_k S'[v,k] q[k]      S = s[p*H + h], replaced by S'

and zero for every other row. Layouts of q, k, v, out and the pool as in `decode_kernel`. Window k [P, N, G, K] and
v [P, N, H, V], K and V contiguous, any other strides; start and length [P].

One program owns `BLOCK_V` rows of V of one (row, head), of the state and of the window's values: it loads them once.
The state's address does not depend on the cursors, so the state is in flight while they come in. The keys of the window
are read by all programs of a group, mostly from the L2 cache.

Nothing races. A window that is not full is read at pending places, i < n, and written at the place n behind them; the
places of i = 0 ... N-1 are different ones. Values are written by the program that owns them, keys by the first program
of the group's first head. A window that is full is read only, and its state is written by the program that owns it.

Any K and V from 1 to 256; sizes that are no powers of two are masked. Batch, pool, heads, strides, scale, pointers, the
number of places up to `PLACES` and the cursors are run-time values: nothing is specialised on them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from la_triton.kernel_parts import bring_in, if_left, key_axis, live_row, ring_cursors, state_tile, store_rounded


@triton.jit
def window_decode_kernel(
    p_q,  # [B, G, K]
    p_k,  # [B, G, K]
    p_v,  # [B, H, V]
    p_s,  # [P*H, V, K]
    p_offsets,  # [B]
    p_decay,  # [H] float32
    p_wk,  # [P, N, G, K]
    p_wv,  # [P, N, H, V]
    p_start,  # [P] int32
    p_length,  # [P] int32
    p_o,  # [B, H, V]
    scale,
    B,
    P,
    N,
    H,
    group,  # H // G
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    o_row,
    o_head,
    wk_slot,
    wk_place,
    wk_head,
    wv_slot,
    wv_place,
    wv_head,
    s_row,
    NEVER,  # -1, which no index is
    K: tl.constexpr,
    V: tl.constexpr,
    PLACES: tl.constexpr,  # N, rounded up to a power of two
    BLOCK_K: tl.constexpr,  # K, rounded up to a power of two
    INNER_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    K_CONTIGUOUS: tl.constexpr,
    ALIGNED: tl.constexpr,  # rows of states and windows start at multiples of 16 bytes, of q and k of 4 elements
    LOAD_EVICTION: tl.constexpr,  # priority of states in the L2 cache as they are read, and as they are written
    STORE_EVICTION: tl.constexpr,
    OVERLAP: tl.constexpr,
    EMULATE_ROUNDING: tl.constexpr,
    ROWS_PER_Z: tl.constexpr,
    IO_PIECE: tl.constexpr,  # bytes of 4 elements of q and k
    WINDOW_PIECE: tl.constexpr,  # and of the window
    STEP: tl.constexpr,  # tokens that a full window brings in at a time
):
    """The module says what it computes; letters and shapes are those of the parameters above."""
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    i_h = (tl.program_id(0) // BLOCKS).to(tl.int64)
    i_v = tl.program_id(0) % BLOCKS
    i_b = tl.program_id(1) + tl.program_id(2) * ROWS_PER_Z
    if OVERLAP:
        gdc_launch_dependents()
    row, slot, live, in_batch = live_row(p_offsets, i_b, B, P)
    p_S, m_S = state_tile(
        p_s + (slot * H + i_h) * s_row, i_v, live, NEVER, K, V, BLOCK_K, INNER_K, BLOCK_V, K_CONTIGUOUS, ALIGNED
    )
    b_S = tl.load(p_S, mask=m_S, other=0.0, eviction_policy=LOAD_EVICTION).to(tl.float32)
    decay = tl.load(p_decay + i_h)
    start, n = ring_cursors(p_start, p_length, slot, live, N, FENCE=True)
    i_g = (tl.program_id(0) // BLOCKS // group).to(tl.int64)
    o_v = i_v * BLOCK_V + tl.arange(0, BLOCK_V)
    o_k = tl.arange(0, BLOCK_K)
    m_v = o_v < V
    m_k = o_k < K
    if not ALIGNED:
        m_v = m_v & (o_v != NEVER)
        m_k = m_k & (o_k != NEVER)
    # The window by places: the token at place j is the `order`-th.
    o_n = tl.arange(0, PLACES)
    order = tl.where(o_n < start, o_n - start + N, o_n - start)
    order = tl.where(o_n < N, order, 2 * PLACES)
    m_n = order < tl.where(n < N, n, 0)
    p_wk = p_wk + slot * wk_slot + i_g * wk_head
    p_wv = p_wv + slot * wv_slot + i_h * wv_head
    p_WK = tl.multiple_of(p_wk + o_n.to(tl.int64)[:, None] * wk_place + o_k[None, :], [1, 16])
    p_WV = tl.multiple_of(p_wv + o_n.to(tl.int64)[:, None] * wv_place + o_v[None, :], [1, 16])
    b_WK = tl.load(p_WK, mask=m_n[:, None] & m_k[None, :], other=0.0).to(tl.float32)
    b_WV = tl.load(p_WV, mask=m_n[:, None] & m_v[None, :], other=0.0).to(tl.float32)
    p_q = p_q + row * q_row + i_g * q_head
    p_k = p_k + row * k_row + i_g * k_head
    if OVERLAP:
        gdc_wait()
    b_k = tl.load(tl.multiple_of(p_k + o_k, IO_PIECE), mask=m_k, other=0.0).to(tl.float32)
    b_q = tl.load(tl.multiple_of(p_q + o_k, IO_PIECE), mask=m_k, other=0.0).to(tl.float32)
    b_v = tl.load(p_v + row * v_row + i_h * v_head + o_v, mask=m_v, other=0.0).to(tl.float32)
    # The same as the state's tile has them: its threads are laid out differently.
    o_K, m_K = key_axis(NEVER, K, BLOCK_K, INNER_K, ALIGNED)
    b_Q = tl.load(tl.multiple_of(p_q + o_K, [1, 1, IO_PIECE]), mask=m_K, other=0.0).to(tl.float32)
    # Powers of the decay have exponents of 0 or more everywhere. Fused where it says so and nowhere else.
    kept = tl.exp(-decay * (n + 1))
    if n == N:
        b_S = bring_in(
            kept * b_S,
            p_wk + o_K,
            m_K,
            p_wv + o_v[None, :, None],
            m_v[None, :, None],
            wk_place,
            wv_place,
            start,
            N,
            N,
            decay,
            N,
            WINDOW_PIECE,
            STEP,
        )
        b_K = tl.load(tl.multiple_of(p_k + o_K, [1, 1, IO_PIECE]), mask=m_K, other=0.0).to(tl.float32)
        b_S = tl.fma(tl.broadcast_to(b_v[None, :, None], b_S.shape), tl.broadcast_to(b_K, b_S.shape), b_S)
        store_rounded(p_S, b_S, m_S, STORE_EVICTION, EMULATE_ROUNDING)
        b_o = tl.sum(tl.sum(b_S * b_Q, axis=0), axis=1)
    else:
        # The new token joins the pending ones at the place where it is written.
        new = (order == n)[:, None]
        b_WK = tl.where(new, b_k[None, :], b_WK)
        b_WV = tl.where(new, b_v[None, :], b_WV)
        weight = tl.exp(-decay * tl.maximum(n - order, 0)) * tl.sum(b_WK * b_q[None, :], axis=1)
        # What other places hold is not even multiplied by zero.
        b_WV = tl.where((order <= n)[:, None], b_WV * weight[:, None], 0.0)
        b_o = kept * tl.sum(tl.sum(b_S * b_Q, axis=0), axis=1) + tl.sum(b_WV, axis=0)
        place = start + n
        place = tl.where(place >= N, place - N, place).to(tl.int64)
        p_new_v = p_wv + place * wv_place + o_v
        tl.store(p_new_v, b_v.to(p_wv.dtype.element_ty), mask=if_left(m_v, live.to(tl.int32)))
        if (i_v == 0) & (i_h == i_g * group):
            p_new_k = tl.multiple_of(p_wk + place * wk_place + o_k, WINDOW_PIECE)
            tl.store(p_new_k, b_k.to(p_wk.dtype.element_ty), mask=if_left(m_k, live.to(tl.int32)))
    b_o = tl.where(live, b_o * scale, 0.0)
    store_rounded(p_o + row * o_row + i_h * o_head + o_v, b_o, o_v < tl.where(in_batch, V, 0), "", EMULATE_ROUNDING)
