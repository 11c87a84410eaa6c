"""decode as one CuTe DSL kernel, with one way through it for each layout of the states.

Computes, for every row b with slot p = s_offsets[b] in [0, P) and head h of group g = h // (H // G),

    S'[v,k] = exp(-d[h]) * S[v,k] + v[b,h,v] * k[b,g,k]      S = s[p*H + h], replaced by S'
    o[b,h,v] = scale * sum_k S'[v,k] * q[b,g,k]

and zero for every other row. Pool [P*H, V, K] with K contiguous ("vk") or V contiguous ("kv"); q and k [B, G, K], v and
out [B, H, V], the last dimension contiguous.

One thread block owns `block_v` rows of V of one (row, head). It loads them once, in 16-byte pieces where the addresses
allow, keeps them in registers, and stores them once. With K contiguous a warp sums its own rows; with V contiguous the
warps of a block share the sum through shared memory. Blocks share nothing.

In a crowd, some more blocks than run at a time, a block's outputs are stored together: two or four rows are too few for
a write of each warp's own. With overlap the next kernel is then let in behind the loads of the states, not first of
all. That also keeps what is computed for the inputs' addresses in front of the wait; the compiler moves it behind
otherwise, where all blocks that have waited compute it at the same time.

A small batch is as quick as its longest chain: slot, state, sum, output. So all that does not depend on the slot stands
before it is used, and a state's address then takes one multiplication; `min_blocks_per_mp` keeps the compiler from
moving loads behind the first use of others to save registers.

K and V of 64, 128 and 256. Batch, pool, heads, strides, scale and pointers are run-time values.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, const_expr, range_constexpr

from la_cute.kernel_parts import (
    ROWS_PER_Z,
    gather_outputs,
    load_pieces,
    load_states,
    spread_sums,
    store_states,
    sum_over_lanes,
    sum_over_lines,
)


@cute.jit
def _load_inputs(
    g_q: cute.Pointer,
    g_k: cute.Pointer,
    g_v: cute.Pointer,
    r_q: cute.Tensor,
    r_k: cute.Tensor,
    r_v: cute.Tensor,
    spec: cutlass.Constexpr,
):
    """Load what a thread needs of q, k and v, from its first element of each on."""
    if const_expr(spec.state_layout == "vk"):
        for j in range_constexpr(spec.threads.repeats):
            load_pieces(g_k + j * spec.repeat_step, r_k[None, j], spec)
            load_pieces(g_q + j * spec.repeat_step, r_q[None, j], spec)
        load_pieces(g_v, r_v, spec)
    else:
        load_pieces(g_k, r_k, spec)
        load_pieces(g_q, r_q, spec)
        for j in range_constexpr(spec.threads.repeats):
            load_pieces(g_v + j * spec.repeat_step, r_v[None, j], spec)


@cute.jit
def _update_vk(
    r_S: cute.Tensor,  # [vector, repeats, passes]
    r_q: cute.Tensor,  # [vector, repeats]
    r_k: cute.Tensor,  # [vector, repeats]
    r_v: cute.Tensor,  # [passes]
    r_o: cute.Tensor,  # [passes]
    alpha: Float32,
    spec: cutlass.Constexpr,
):
    """Update a thread's part of a state with K contiguous, and leave its part of each row's output in `r_o`."""
    for i in range_constexpr(spec.threads.passes):
        b_o = Float32(0.0)
        for j in range_constexpr(spec.threads.repeats):
            for n in range_constexpr(spec.threads.vector):
                b_S = cute.math.fma(r_v[i], r_k[n, j], alpha * r_S[n, j, i].to(Float32))
                b_o = cute.math.fma(b_S, r_q[n, j], b_o)
                r_S[n, j, i] = b_S.to(r_S.element_type)
        r_o[i] = b_o


@cute.jit
def _update_kv(
    r_S: cute.Tensor,  # [vector, repeats, passes]
    r_q: cute.Tensor,  # [passes]
    r_k: cute.Tensor,  # [passes]
    r_v: cute.Tensor,  # [vector, repeats]
    r_o: cute.Tensor,  # [vector, repeats]
    alpha: Float32,
    spec: cutlass.Constexpr,
):
    """Update a thread's part of a state with V contiguous, and leave its part of each row's output in `r_o`."""
    r_o.fill(0.0)
    for i in range_constexpr(spec.threads.passes):
        for j in range_constexpr(spec.threads.repeats):
            for n in range_constexpr(spec.threads.vector):
                b_S = cute.math.fma(r_v[n, j], r_k[i], alpha * r_S[n, j, i].to(Float32))
                r_o[n, j] = cute.math.fma(b_S, r_q[i], r_o[n, j])
                r_S[n, j, i] = b_S.to(r_S.element_type)


@cute.kernel
def decode_kernel(
    s_offsets: cute.Tensor,  # [B]
    s: cute.Tensor,  # [P*H, V, K]
    decay_scales: cute.Tensor,  # [H] float32
    q: cute.Tensor,  # [B, G, K]
    k: cute.Tensor,  # [B, G, K]
    v: cute.Tensor,  # [B, H, V]
    out: cute.Tensor,  # [B, H, V]
    scale: Float32,
    slots: Int64,  # P
    slot_stride: Int64,  # elements between slots
    group: cute.FastDivmodDivisorV2,  # H // G
    spec: cutlass.Constexpr,
):
    """The module says what it computes; letters and shapes are those of the parameters above."""
    if const_expr(spec.overlap and not spec.tiles.crowded):
        cute.arch.griddepcontrol_launch_dependents()
    thread, _, _ = cute.arch.thread_idx()
    block_x, block_y, block_z = cute.arch.block_idx()
    i_h = block_x // spec.blocks
    start_v = block_x % spec.blocks * spec.tiles.block_v
    row = block_y + block_z * ROWS_PER_Z
    lane, warp = thread % 32, thread // 32
    vector, lanes, repeats, lines, passes = spec.threads
    own = lane % lanes
    line = cute.assume((warp * lines + lane // lanes) * passes, divby=passes)
    if const_expr(spec.tiles.crowded or spec.state_layout == "kv"):
        memory = cutlass.memory.SmemAllocator()
        sums = const_expr(1 if spec.tiles.crowded else spec.tiles.num_warps)
        s_o = memory.allocate_tensor(Float32, cute.make_layout((spec.tiles.block_v, sums)), 16)
    if row < s_offsets.shape[0]:
        slot = Int64(s_offsets[row])
        alpha = cute.math.exp(-decay_scales[i_h], fastmath=False)
        if const_expr(spec.state_layout == "vk"):
            i_v, i_k = cute.assume(start_v + line, divby=passes), cute.assume(own * vector, divby=vector)
            inner = i_v * spec.K + i_k
            i_o, writes = i_v + own, own < passes
            if const_expr(spec.tiles.spread_sums):
                i_o, writes = i_v + own // (lanes // passes), own % (lanes // passes) == 0
            of_k, of_v = cute.make_layout((vector, repeats)), cute.make_layout(passes)
        else:
            i_v, i_k = cute.assume(start_v + own * vector, divby=vector), line
            inner = i_k * spec.V + i_v
            i_o, writes = start_v + thread, thread < spec.tiles.block_v
            of_k, of_v = cute.make_layout(passes), cute.make_layout((vector, repeats))
        i_g = i_h // group
        g_q, g_k = q[row, i_g, None].iterator + i_k, k[row, i_g, None].iterator + i_k
        g_v, g_out = v[row, i_h, None].iterator + i_v, out[row, i_h, None]
        r_q, r_k = cute.make_rmem_tensor(of_k, Float32), cute.make_rmem_tensor(of_k, Float32)
        r_v = cute.make_rmem_tensor(of_v, Float32)
        if const_expr(not spec.overlap):
            _load_inputs(g_q, g_k, g_v, r_q, r_k, r_v, spec)
        first = s[i_h, None, None].iterator + cute.assume(inner, divby=vector)
        live = (slot >= 0) & (slot < slots)
        g_S = first + cute.assume(slot * slot_stride, divby=vector if const_expr(spec.aligned) else 1)
        r_S = cute.make_rmem_tensor(cute.make_layout((vector, repeats, passes)), s.element_type)
        load_states(g_S, r_S, live, spec)
        if const_expr(spec.overlap):
            if const_expr(spec.tiles.crowded):
                cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()
            _load_inputs(g_q, g_k, g_v, r_q, r_k, r_v, spec)
        # All inputs are loaded by now: the compiler must assume that a store changes what is read behind it.
        r_o = cute.make_rmem_tensor(of_v, Float32)
        if const_expr(spec.state_layout == "vk"):
            _update_vk(r_S, r_q, r_k, r_v, r_o, alpha, spec)
        else:
            _update_kv(r_S, r_q, r_k, r_v, r_o, alpha, spec)
        if const_expr(spec.tiles.store_first):
            store_states(r_S, g_S, live, spec)
        if const_expr(spec.state_layout == "kv"):
            b_o = sum_over_lines(r_o, thread, s_o, spec)
        elif const_expr(spec.tiles.spread_sums):
            spread_sums(r_o, own, lanes)
            b_o = r_o[0]
        else:
            b_o = sum_over_lanes(r_o, own, spec)
        if const_expr(not spec.tiles.store_first):
            store_states(r_S, g_S, live, spec)
        if const_expr(spec.tiles.crowded):
            b_o = gather_outputs(b_o, i_o - start_v, writes, thread, s_o, spec)
            i_o, writes = start_v + thread, thread < spec.tiles.block_v
        b_o = b_o * scale
        if not live:
            b_o = Float32(0.0)
        if writes:
            g_out[i_o] = b_o.to(out.element_type)


@cute.jit
def launch(
    s_offsets: cute.Tensor,
    s: cute.Tensor,
    decay_scales: cute.Tensor,
    q: cute.Tensor,
    k: cute.Tensor,
    v: cute.Tensor,
    out: cute.Tensor,
    scale: Float32,
    slots: Int64,
    stream,
    spec: cutlass.Constexpr,
):
    """Launch the kernel of `spec` on a stream; arguments as in the kernel."""
    heads, rows = v.shape[1], s_offsets.shape[0]
    slot_stride = Int64(heads) * s.stride[0]
    group = cute.FastDivmodDivisorV2(heads // q.shape[1])
    decode_kernel(s_offsets, s, decay_scales, q, k, v, out, scale, slots, slot_stride, group, spec).launch(
        grid=(heads * spec.blocks, cutlass.min(rows, ROWS_PER_Z), (rows + ROWS_PER_Z - 1) // ROWS_PER_Z),
        block=(32 * spec.tiles.num_warps, 1, 1),
        stream=stream,
        use_pdl=spec.overlap,
        min_blocks_per_mp=1,
    )
