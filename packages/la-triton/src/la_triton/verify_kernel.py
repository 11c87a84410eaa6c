# mypy: ignore-errors
"""verify as one Triton kernel.

Computes, for every row b with slot p = s_offsets[b] in [0, P), whose window has n = length[p] of N places pending and
room for its m = draft_lengths[b] <= T drafts, head h of group g = h // (H // G) and t < m,

    o[b,t,h,v] = scale * (exp(-d*(n+t+1)) * sum_k S[v,k] q_t[k] + sum_i exp(-d*(n+t-i)) * (k_i . q_t) * v_i[v])

where i = 0 ... n-1 are the pending tokens, oldest first, and i = n ... n+t the drafts 0 ... t: k[b,i-n,g], v[b,i-n,h].
They are written to the places (start[p] + i) % N of the window. Outputs of t >= m and of other rows are zero; where
n + m > N they are NaN for t < m, and nothing is written.

q, k [B, T, G, K], v and out [B, T, H, V], K and V contiguous; pool and window as in `window_decode_kernel`.

One program owns `BLOCK_V` rows of V of one (row, head). It loads them once and keeps them, and the keys and values of
all places, pending ones from the window and drafts from the inputs, for a loop over the drafts.

Nothing races. A window is read at pending places, i < n, and written at the places n <= i < n + m <= N; the places of
i = 0 ... N-1 are different ones. Drafts are read from the inputs. Values are written by the program that owns them,
keys by the first program of the group's first head. The state is not written.

Limits as in `window_decode_kernel`; T and the counts are run-time values as well.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from la_triton.kernel_parts import count_of_row, if_left, key_axis, live_row, ring_cursors, state_tile, store_rounded


@triton.jit
def times_q(b_S, b_WK, p_q, o_K, m_K, o_k, m_k, q_token, t, m, PIECE: tl.constexpr):
    """A state [BLOCK_V] and the keys of a window [PLACES] times the t-th draft's q; zero without such a draft."""
    p_t = p_q + tl.cast(t, tl.int64) * q_token
    # q once for each: their threads are laid out differently.
    b_Q = tl.load(tl.multiple_of(p_t + o_K, [1, 1, PIECE]), mask=if_left(m_K, m - t), other=0.0).to(tl.float32)
    b_q = tl.load(tl.multiple_of(p_t + o_k, PIECE), mask=if_left(m_k, m - t), other=0.0).to(tl.float32)
    return tl.sum(tl.sum(b_S * b_Q, axis=0), axis=1), tl.sum(b_WK * b_q[None, :], axis=1)


@triton.jit
def verify_kernel(
    p_q,  # [B, T, G, K]
    p_k,  # [B, T, G, K]
    p_v,  # [B, T, H, V]
    p_s,  # [P*H, V, K]
    p_offsets,  # [B]
    p_decay,  # [H] float32
    p_wk,  # [P, N, G, K]
    p_wv,  # [P, N, H, V]
    p_start,  # [P] int32
    p_length,  # [P] int32
    p_counts,  # [B], or anything without HAS_COUNTS
    p_o,  # [B, T, H, V]
    scale,
    B,
    T,
    P,
    N,
    H,
    group,  # H // G
    q_row,
    q_token,
    q_head,
    k_row,
    k_token,
    k_head,
    v_row,
    v_token,
    v_head,
    o_row,
    o_token,
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
    HAS_COUNTS: tl.constexpr,
    LOAD_EVICTION: tl.constexpr,  # priority of states in the L2 cache
    OVERLAP: tl.constexpr,
    EMULATE_ROUNDING: tl.constexpr,
    ROWS_PER_Z: tl.constexpr,
    IO_PIECE: tl.constexpr,  # bytes of 4 elements of q and k
    STEP: tl.constexpr,  # drafts at a time, whose loads are in flight together
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
        # True for every element, but not known to be: accesses then go element by element.
        m_v = m_v & (o_v != NEVER)
        m_k = m_k & (o_k != NEVER)
    # The window by places: the token at place j is the `order`-th.
    o_n = tl.arange(0, PLACES)
    order = tl.where(o_n < start, o_n - start + N, o_n - start)
    order = tl.where(o_n < N, order, 2 * PLACES)
    pending = order < n
    o_n = o_n.to(tl.int64)
    p_WK = p_wk + slot * wk_slot + i_g * wk_head + o_n[:, None] * wk_place + o_k[None, :]
    p_WV = p_wv + slot * wv_slot + i_h * wv_head + o_n[:, None] * wv_place + o_v[None, :]
    p_WK = tl.multiple_of(p_WK, [1, 16])
    p_WV = tl.multiple_of(p_WV, [1, 16])
    b_WK = tl.load(p_WK, mask=pending[:, None] & m_k[None, :], other=0.0).to(tl.float32)
    b_WV = tl.load(p_WV, mask=pending[:, None] & m_v[None, :], other=0.0).to(tl.float32)
    o_K, m_K = key_axis(NEVER, K, BLOCK_K, INNER_K, ALIGNED)
    if OVERLAP:
        gdc_wait()
    m = tl.where(live, count_of_row(p_counts, row, T, T, HAS_COUNTS), 0)
    room = n + m <= N
    drafted = (order >= n) & (order < tl.where(room, n + m, 0))
    # A draft's number where it is one: it alone is read.
    o_t = (order - n).to(tl.int64)
    p_DK = tl.multiple_of(p_k + row * k_row + i_g * k_head + o_t[:, None] * k_token + o_k[None, :], [1, IO_PIECE])
    p_DV = p_v + row * v_row + i_h * v_head + o_t[:, None] * v_token + o_v[None, :]
    b_DK = tl.load(p_DK, mask=drafted[:, None] & m_k[None, :], other=0.0).to(tl.float32)
    b_DV = tl.load(p_DV, mask=drafted[:, None] & m_v[None, :], other=0.0).to(tl.float32)
    tl.store(p_WV, b_DV.to(p_wv.dtype.element_ty), mask=drafted[:, None] & m_v[None, :])
    if (i_v == 0) & (i_h == i_g * group):
        tl.store(p_WK, b_DK.to(p_wk.dtype.element_ty), mask=drafted[:, None] & m_k[None, :])
    b_WK = tl.where(drafted[:, None], b_DK, b_WK)
    b_WV = tl.where(drafted[:, None], b_DV, b_WV)
    p_q = p_q + row * q_row + i_g * q_head
    p_o = p_o + row * o_row + i_h * o_head + o_v[:, None]
    m_o = o_v < tl.where(in_batch, V, 0)
    for first in range(0, T, STEP):
        # Times the state, [BLOCK_V], and times the keys, [PLACES], draft by draft; then side by side, [.., STEP].
        b_o, dots = times_q(b_S, b_WK, p_q, o_K, m_K, o_k, m_k, q_token, first, m, IO_PIECE)
        if STEP >= 2:
            b_o1, dots1 = times_q(b_S, b_WK, p_q, o_K, m_K, o_k, m_k, q_token, first + 1, m, IO_PIECE)
            if STEP == 4:
                b_o2, dots2 = times_q(b_S, b_WK, p_q, o_K, m_K, o_k, m_k, q_token, first + 2, m, IO_PIECE)
                b_o3, dots3 = times_q(b_S, b_WK, p_q, o_K, m_K, o_k, m_k, q_token, first + 3, m, IO_PIECE)
                b_o, dots, b_o1, dots1 = (
                    tl.join(b_o, b_o2),
                    tl.join(dots, dots2),
                    tl.join(b_o1, b_o3),
                    tl.join(dots1, dots3),
                )
            b_o, dots = tl.join(b_o, b_o1), tl.join(dots, dots1)
        b_o = tl.reshape(b_o, [BLOCK_V, STEP])
        dots = tl.reshape(dots, [PLACES, STEP])
        t = first + tl.arange(0, STEP)
        # Powers of the decay have exponents of 0 or more. What lies ahead is not even multiplied by zero.
        ahead = n + t[None, :] - order[:, None]
        weight = tl.exp(-decay * tl.maximum(ahead, 0)) * dots
        b_w = tl.where((ahead >= 0)[:, None, :], b_WV[:, :, None] * weight[:, None, :], 0.0)
        b_o = tl.exp(-decay * (n + t + 1))[None, :] * b_o + tl.sum(b_w, axis=0)
        # Without room for its drafts a row has none.
        b_o = tl.where((t < tl.where(room, m, 0))[None, :], b_o * scale, tl.where((t < m)[None, :], float("nan"), 0.0))
        m_t = m_o[:, None] & (t < T)[None, :]
        store_rounded(p_o + t.to(tl.int64)[None, :] * o_token, b_o, m_t, "", EMULATE_ROUNDING)
