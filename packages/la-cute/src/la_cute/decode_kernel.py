"""decode as two CuTe DSL kernels, one for each layout of the states.

Computes, for every row b with slot p = s_offsets[b] in [0, P) and head h of group g = h // (H // G),

    S'[v,k] = exp(-d[h]) * S[v,k] + v[b,h,v] * k[b,g,k]      S = s[p*H + h], replaced by S'
    o[b,h,v] = scale * sum_k S'[v,k] * q[b,g,k]

and zero for every other row. Pool [P*H, V, K] with K contiguous ("vk") or V contiguous ("kv"); q and k [B, G, K], v and
out [B, H, V], the last dimension contiguous.

One thread block owns `block_v` rows of V of one (row, head). It loads them once, in 16-byte pieces where the addresses
allow, keeps them in registers, and stores them once. With K contiguous a warp sums its own rows; with V contiguous the
warps of a block share the sum through shared memory. Blocks share nothing.

K and V of 64, 128 and 256. Batch, pool, heads, strides, scale and pointers are run-time values. Not measured yet.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr

ROWS_PER_Z = 32768
"""Rows on the second axis of the grid, which holds at most 65,535 blocks; the rest goes to the third."""

CACHE_POLICY = {"evict_first": 0x12F0000000000000, "evict_last": 0x14F0000000000000}
"""What `createpolicy` makes for all of an access; the hardware's encoding."""


@cute.jit
def _load(run: cute.Pointer, values: cute.Tensor, spec: cutlass.Constexpr):
    """Load a thread's piece of a run of states."""
    piece = cute.make_layout(spec.threads.vector)
    if const_expr(spec.aligned):
        atom = cute.make_copy_atom(cute.nvgpu.CopyG2ROp(), values.element_type, num_bits_per_copy=128)
        source = cute.make_tensor(run.align(16), piece)
        if const_expr(spec.load_policy is None):
            cute.copy(atom, source, values)
        else:
            cute.copy(atom, source, values, cache_policy=Int64(spec.load_policy))
    else:
        source = cute.make_tensor(run, piece)
        for i in range_constexpr(spec.threads.vector):
            values[i] = source[i]


@cute.jit
def _store(values: cute.Tensor, run: cute.Pointer, spec: cutlass.Constexpr):
    """Store a thread's piece of a run of states."""
    piece = cute.make_layout(spec.threads.vector)
    if const_expr(spec.aligned):
        atom = cute.make_copy_atom(cute.nvgpu.CopyR2GOp(), values.element_type, num_bits_per_copy=128)
        target = cute.make_tensor(run.align(16), piece)
        if const_expr(spec.store_policy is None):
            cute.copy(atom, values, target)
        else:
            cute.copy(atom, values, target, cache_policy=Int64(spec.store_policy))
    else:
        target = cute.make_tensor(run, piece)
        for i in range_constexpr(spec.threads.vector):
            target[i] = values[i]


@cute.kernel
def decode_kernel_vk(
    s_offsets: cute.Tensor,  # [B]
    s: cute.Tensor,  # [P*H, V, K]
    decay_scales: cute.Tensor,  # [H] float32
    q: cute.Tensor,  # [B, G, K]
    k: cute.Tensor,  # [B, G, K]
    v: cute.Tensor,  # [B, H, V]
    out: cute.Tensor,  # [B, H, V]
    scale: Float32,
    slots: Int64,  # P
    group: Int32,  # H // G
    spec: cutlass.Constexpr,
):
    """K contiguous: a warp owns `passes * lines` rows of V, and sums each over its lanes."""
    if const_expr(spec.overlap):
        cute.arch.griddepcontrol_launch_dependents()
    thread, _, _ = cute.arch.thread_idx()
    block_x, block_y, block_z = cute.arch.block_idx()
    i_h = block_x // spec.blocks
    i_g = i_h // group
    row = block_y + block_z * ROWS_PER_Z
    lane = thread % 32
    o_k = lane % spec.threads.lanes * spec.threads.vector
    # First row of V of this thread, in the block and in the head; the next is `lines` further on.
    first = thread // 32 * spec.threads.passes * spec.threads.lines + lane // spec.threads.lanes
    start_v = block_x % spec.blocks * spec.tiles.block_v
    if row < s_offsets.shape[0]:
        slot = Int64(s_offsets[row])
        g_out = out[row, i_h, None]
        if (slot >= 0) & (slot < slots):
            g_S = s[slot * v.shape[1] + i_h, None, None].iterator + (start_v + first) * spec.K + o_k
            shape = (spec.threads.vector, spec.threads.repeats, spec.threads.passes)
            r_S = cute.make_rmem_tensor(cute.make_layout(shape), s.element_type)
            for i in range_constexpr(spec.threads.passes):
                for j in range_constexpr(spec.threads.repeats):
                    at = i * spec.threads.lines * spec.K + j * spec.threads.lanes * spec.threads.vector
                    _load(g_S + at, r_S[None, j, i], spec)
            alpha = cute.math.exp(-decay_scales[i_h], fastmath=False)
            if const_expr(spec.overlap):
                cute.arch.griddepcontrol_wait()
            g_q, g_k, g_v = q[row, i_g, None], k[row, i_g, None], v[row, i_h, None]
            pieces = cute.make_layout(shape[:2])
            r_q, r_k = cute.make_rmem_tensor(pieces, Float32), cute.make_rmem_tensor(pieces, Float32)
            for j in range_constexpr(spec.threads.repeats):
                for n in range_constexpr(spec.threads.vector):
                    at = o_k + j * spec.threads.lanes * spec.threads.vector + n
                    r_q[n, j] = g_q[at].to(Float32)
                    r_k[n, j] = g_k[at].to(Float32)
            # All inputs before the first store: the compiler must assume that a store changes what is read behind it.
            r_v = cute.make_rmem_tensor(cute.make_layout(spec.threads.passes), Float32)
            for i in range_constexpr(spec.threads.passes):
                r_v[i] = g_v[start_v + first + i * spec.threads.lines].to(Float32)
            mine = Float32(0.0)
            for i in range_constexpr(spec.threads.passes):
                b_o = Float32(0.0)
                for j in range_constexpr(spec.threads.repeats):
                    for n in range_constexpr(spec.threads.vector):
                        b_S = cute.math.fma(r_v[i], r_k[n, j], alpha * r_S[n, j, i].to(Float32))
                        b_o = cute.math.fma(b_S, r_q[n, j], b_o)
                        r_S[n, j, i] = b_S.to(s.element_type)
                    at = i * spec.threads.lines * spec.K + j * spec.threads.lanes * spec.threads.vector
                    _store(r_S[None, j, i], g_S + at, spec)
                for n in range_constexpr(spec.steps):
                    b_o = b_o + cute.arch.shuffle_sync_bfly(b_o, offset=spec.threads.lanes >> (n + 1))
                # All lanes of a line have its sum; lane i keeps that of pass i, so that one store writes them all.
                if lane % spec.threads.lanes == i:
                    mine = b_o
            own = lane % spec.threads.lanes
            if own < spec.threads.passes:
                g_out[start_v + first + own * spec.threads.lines] = (mine * scale).to(out.element_type)
        else:
            if const_expr(spec.overlap):
                # The kernel before may still read what it was given as this call's output.
                cute.arch.griddepcontrol_wait()
            if thread < spec.tiles.block_v:
                g_out[start_v + thread] = Float32(0.0).to(out.element_type)


@cute.kernel
def decode_kernel_kv(
    s_offsets: cute.Tensor,  # [B]
    s: cute.Tensor,  # [P*H, V, K]
    decay_scales: cute.Tensor,  # [H] float32
    q: cute.Tensor,  # [B, G, K]
    k: cute.Tensor,  # [B, G, K]
    v: cute.Tensor,  # [B, H, V]
    out: cute.Tensor,  # [B, H, V]
    scale: Float32,
    slots: Int64,  # P
    group: Int32,  # H // G
    spec: cutlass.Constexpr,
):
    """V contiguous: a warp owns every `num_warps * lines`-th column of K and a run of V, and the block sums over K."""
    if const_expr(spec.overlap):
        cute.arch.griddepcontrol_launch_dependents()
    thread, _, _ = cute.arch.thread_idx()
    block_x, block_y, block_z = cute.arch.block_idx()
    i_h = block_x // spec.blocks
    i_g = i_h // group
    row = block_y + block_z * ROWS_PER_Z
    lane, warp = thread % 32, thread // 32
    o_v = lane % spec.threads.lanes * spec.threads.vector
    # First column of K of this thread; the next is `columns` further on.
    first = warp * spec.threads.lines + lane // spec.threads.lanes
    columns = spec.tiles.num_warps * spec.threads.lines
    start_v = block_x % spec.blocks * spec.tiles.block_v
    memory = cutlass.memory.SmemAllocator()
    s_o = memory.allocate_tensor(Float32, cute.make_layout((spec.tiles.block_v, spec.tiles.num_warps)), 16)
    if row < s_offsets.shape[0]:
        slot = Int64(s_offsets[row])
        g_out = out[row, i_h, None]
        if (slot >= 0) & (slot < slots):
            g_S = s[slot * v.shape[1] + i_h, None, None].iterator + first * spec.V + start_v + o_v
            shape = (spec.threads.vector, spec.threads.passes)
            r_S = cute.make_rmem_tensor(cute.make_layout(shape), s.element_type)
            for i in range_constexpr(spec.threads.passes):
                _load(g_S + i * columns * spec.V, r_S[None, i], spec)
            alpha = cute.math.exp(-decay_scales[i_h], fastmath=False)
            if const_expr(spec.overlap):
                cute.arch.griddepcontrol_wait()
            g_q, g_k, g_v = q[row, i_g, None], k[row, i_g, None], v[row, i_h, None]
            values = cute.make_layout(spec.threads.vector)
            r_v, r_o = cute.make_rmem_tensor(values, Float32), cute.make_rmem_tensor(values, Float32)
            for n in range_constexpr(spec.threads.vector):
                r_v[n] = g_v[start_v + o_v + n].to(Float32)
                r_o[n] = Float32(0.0)
            # All inputs before the first store: the compiler must assume that a store changes what is read behind it.
            of_columns = cute.make_layout(spec.threads.passes)
            r_q = cute.make_rmem_tensor(of_columns, q.element_type)
            r_k = cute.make_rmem_tensor(of_columns, k.element_type)
            for i in range_constexpr(spec.threads.passes):
                r_q[i] = g_q[first + i * columns]
                r_k[i] = g_k[first + i * columns]
            for i in range_constexpr(spec.threads.passes):
                b_q, b_k = r_q[i].to(Float32), r_k[i].to(Float32)
                for n in range_constexpr(spec.threads.vector):
                    b_S = cute.math.fma(r_v[n], b_k, alpha * r_S[n, i].to(Float32))
                    r_o[n] = cute.math.fma(b_S, b_q, r_o[n])
                    r_S[n, i] = b_S.to(s.element_type)
                _store(r_S[None, i], g_S + i * columns * spec.V, spec)
            for n in range_constexpr(spec.threads.vector):
                b_o = r_o[n]
                for step in range_constexpr(spec.steps):
                    b_o = b_o + cute.arch.shuffle_sync_bfly(b_o, offset=16 >> step)
                if lane < spec.threads.lanes:
                    s_o[o_v + n, warp] = b_o
            cute.arch.sync_threads()
            if thread < spec.tiles.block_v:
                total = s_o[thread, 0]
                for w in range_constexpr(1, spec.tiles.num_warps):
                    total = total + s_o[thread, w]
                g_out[start_v + thread] = (total * scale).to(out.element_type)
        else:
            if const_expr(spec.overlap):
                # The kernel before may still read what it was given as this call's output.
                cute.arch.griddepcontrol_wait()
            if thread < spec.tiles.block_v:
                g_out[start_v + thread] = Float32(0.0).to(out.element_type)


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
    """Launch the kernel of `spec` on a stream; arguments as in the kernels."""
    heads, rows = v.shape[1], s_offsets.shape[0]
    kernel = decode_kernel_vk if const_expr(spec.state_layout == "vk") else decode_kernel_kv
    kernel(s_offsets, s, decay_scales, q, k, v, out, scale, slots, heads // q.shape[1], spec).launch(
        grid=(heads * spec.blocks, cutlass.min(rows, ROWS_PER_Z), (rows + ROWS_PER_Z - 1) // ROWS_PER_Z),
        block=(32 * spec.tiles.num_warps, 1, 1),
        stream=stream,
        use_pdl=spec.overlap,
    )
