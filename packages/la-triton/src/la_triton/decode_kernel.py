"""decode as one Triton kernel.

Computes, for every row b with slot p = s_offsets[b] in [0, P) and head h of group g = h // (H // G),

    S'[v,k] = exp(-d[h]) * S[v,k] + v[b,h,v] * k[b,g,k]      S = s[p*H + h], replaced by S'
    o[b,h,v] = scale * sum_k S'[v,k] * q[b,g,k]

and zero for every other row. Pool [P*H, V, K] with K contiguous ("vk") or V contiguous ("kv").

q and k [B, G, K], v and out [B, H, V], all with K or V contiguous and any other strides.

One program owns `BLOCK_V` rows of V of one (row, head): it loads them once, in 16-byte pieces where the addresses
allow, keeps them in registers, and stores them once. Programs share nothing. How many rows one owns follows the batch;
that this changes no bit is for `choose_decode_tiles` to see to, and its docstring says where it was measured.

Any K and V from 1 to 256; sizes that are no powers of two are masked. Batch, pool, heads, strides, scale and pointers
are run-time values: nothing is specialised on them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from la_triton.kernel_parts import store_rounded


@triton.jit
def decode_kernel(
    p_q,  # [B, G, K]
    p_k,  # [B, G, K]
    p_v,  # [B, H, V]
    p_s,  # [P*H, V, K]
    p_offsets,  # [B]
    p_decay,  # [H] float32
    p_o,  # [B, H, V]
    scale,
    B,
    P,
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
    s_row,
    NEVER,  # -1, which no index is
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,  # K, rounded up to a power of two
    BLOCK_V: tl.constexpr,
    K_CONTIGUOUS: tl.constexpr,
    ALIGNED: tl.constexpr,  # rows of states start at multiples of 16 bytes, of q and k at multiples of 4 elements
    LOAD_EVICTION: tl.constexpr,  # priority of states in the L2 cache as they are read, and as they are written
    STORE_EVICTION: tl.constexpr,
    OVERLAP: tl.constexpr,
    EMULATE_ROUNDING: tl.constexpr,
    ROWS_PER_Z: tl.constexpr,
    IO_PIECE: tl.constexpr,  # bytes of 4 elements of q and k
):
    """The module says what it computes; letters and shapes are those of the parameters above."""
    BLOCKS: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    i_h = (tl.program_id(0) // BLOCKS).to(tl.int64)
    i_v = tl.program_id(0) % BLOCKS
    i_b = tl.program_id(1) + tl.program_id(2) * ROWS_PER_Z
    if OVERLAP:
        gdc_launch_dependents()
    o_v = i_v * BLOCK_V + tl.arange(0, BLOCK_V)
    o_k = tl.arange(0, BLOCK_K)
    m_v = o_v < V
    m_k = o_k < K
    if not ALIGNED:
        # True for every element, but not known to be: accesses then go element by element. The pieces promised below
        # only shape the layout, so that sums run in the same order, and give the same bits, whatever the addresses.
        m_v = m_v & (o_v != NEVER)
        m_k = m_k & (o_k != NEVER)
    in_batch = i_b < B
    row = tl.minimum(i_b, B - 1).to(tl.int64)
    slot = tl.load(p_offsets + row).to(tl.int64)
    # Limits instead of a branch: nothing but the state waits for the slot.
    live = (slot >= 0) & (slot < P) & in_batch
    # The block's address first, then offsets known to be small: a thread's accesses differ by constants alone.
    if K_CONTIGUOUS:
        p_S = p_s + ((slot * H + i_h) * s_row + i_v * BLOCK_V * K)
        p_S = p_S + tl.arange(0, BLOCK_V)[:, None] * K + o_k[None, :]
        m_S = (o_v < tl.where(live, V, 0))[:, None] & (o_k[None, :] >= 0)
        if not ALIGNED or K != BLOCK_K:
            m_S = m_S & m_k[None, :]
    else:
        p_S = p_s + ((slot * H + i_h) * s_row + i_v * BLOCK_V)
        p_S = p_S + o_k[:, None] * V + tl.arange(0, BLOCK_V)[None, :]
        m_S = (o_k < tl.where(live, K, 0))[:, None] & (o_v[None, :] >= 0)
        if not ALIGNED or V % BLOCK_V != 0:
            m_S = m_S & m_v[None, :]
    p_S = tl.multiple_of(p_S, [1, 16])
    b_S = tl.load(p_S, mask=m_S, other=0.0, eviction_policy=LOAD_EVICTION).to(tl.float32)
    alpha = tl.exp(-tl.load(p_decay + i_h))
    # The division comes behind the loads, which need not wait for it.
    i_g = (tl.program_id(0) // BLOCKS // group).to(tl.int64)
    p_k = tl.multiple_of(p_k + row * k_row + i_g * k_head + o_k, IO_PIECE)
    p_q = tl.multiple_of(p_q + row * q_row + i_g * q_head + o_k, IO_PIECE)
    p_v = p_v + row * v_row + i_h * v_head + o_v
    p_out = p_o + row * o_row + i_h * o_head + o_v
    if OVERLAP:
        gdc_wait()
    b_k = tl.load(p_k, mask=m_k, other=0.0).to(tl.float32)
    b_q = tl.load(p_q, mask=m_k, other=0.0).to(tl.float32)
    b_v = tl.load(p_v, mask=m_v, other=0.0).to(tl.float32)
    # Fused where it says so and nowhere else: left to itself, the compiler fuses in one variant and not in another.
    if K_CONTIGUOUS:
        b_v, b_k, b_q = b_v[:, None], b_k[None, :], b_q[None, :]
    else:
        b_v, b_k, b_q = b_v[None, :], b_k[:, None], b_q[:, None]
    b_S = tl.fma(tl.broadcast_to(b_v, b_S.shape), tl.broadcast_to(b_k, b_S.shape), alpha * b_S)
    store_rounded(p_S, b_S, m_S, STORE_EVICTION, EMULATE_ROUNDING)
    b_o = tl.sum(b_S * b_q, axis=1 if K_CONTIGUOUS else 0)
    b_o = tl.where(live, b_o * scale, 0.0)
    store_rounded(p_out, b_o, o_v < tl.where(in_batch, V, 0), "", EMULATE_ROUNDING)
