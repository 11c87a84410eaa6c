# mypy: ignore-errors
"""verify as one CuTe DSL kernel: the outputs of a few draft tokens, and their k and v behind the pending ones.

For every row b with slot p = s_offsets[b] in [0, P), n = length[p] pending tokens, m = draft_lengths[b] drafts (T
without lengths), n + m <= N, and head h of group g = h // (H // G), with keys and values of ages i = 0 ... n+m-1,
pending tokens first, then drafts:

    o[b,t,h,v] = scale * (exp(-d(n+t+1)) sum_k S[v,k] q_t[k] + sum_{i <= n+t} exp(-d(n+t-i)) (k_i q_t) v_i[v])
    place (start + n + t) % N of the window = k_t, v_t

for t < m.

Outputs behind m are zero, and so are those of other rows. Without room (n + m > N) the outputs t < m are NaN and
nothing is written. Layouts as in decode, with a token axis: q, k [B, T, G, K], v, out [B, T, H, V].

One thread block owns `block_v` rows of V of one (row, head), in registers from one load. It works on `DRAFTS` drafts
side by side, and goes through more in a loop; their queries lie in shared memory in float32. First its teams of 8
threads multiply the key of each place with every q_t, and leave the weights in shared memory; a draft's key comes from
the input, and the place is where it will lie. Then the block multiplies the state with every q_t, and adds the weights
times the parts of v that its threads hold.

What takes time is waiting for memory, so all that the first drafts need is on its way before anything is waited for,
and a block has few registers, so that many blocks have their states on the way.

Nothing races. Blocks read places of ages below n, and write places of ages n ... n+m-1, of which there are no two alike
as n + m <= N: k by the block of the group's first head and the state's first rows, v by its owner. What a block needs
of the drafts it takes from the inputs. The state and the cursors are only read. In shared memory, a barrier lies
between what is written and those that read it, and between them and what is written next: queries are replaced between
two barriers, and the weights of each group of drafts have a place of their own.

Limits are those of the decode kernel.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr

from la_cute.kernel_parts import ROWS_PER_Z, load_states, spread_sums
from la_cute.verify_parts import (
    RUN,
    add_values,
    leave_weights,
    load_queries,
    load_tokens,
    move_queries,
    share_outputs,
    state_products,
    store_drafts,
    store_queries,
)
from la_cute.window_parts import limited, read_cursors
from la_cute.window_tiles import DRAFTS, TEAM


@cute.kernel
def verify_kernel(
    s_offsets: cute.Tensor,  # [B]
    s: cute.Tensor,  # [P*H, V, K]
    decay_scales: cute.Tensor,  # [H] float32
    q: cute.Tensor,  # [B, T, G, K]
    k: cute.Tensor,  # [B, T, G, K]
    v: cute.Tensor,  # [B, T, H, V]
    out: cute.Tensor,  # [B, T, H, V]
    window_k: cute.Tensor,  # [P, N, G, K]
    window_v: cute.Tensor,  # [P, N, H, V]
    start: cute.Tensor,  # [P] int32
    length: cute.Tensor,  # [P] int32
    draft_lengths: cute.Tensor | None,  # [B]
    scale: Float32,
    slot_stride: Int64,  # elements between slots of s
    group: cute.FastDivmodDivisorV2,  # H // G
    ring: cute.FastDivmodDivisorV2,  # N
    spec: cutlass.Constexpr,
):
    """The module says what it computes; letters and shapes are those of the parameters above."""
    if const_expr(spec.overlap):
        cute.arch.griddepcontrol_launch_dependents()
    thread, _, _ = cute.arch.thread_idx()
    block_x, block_y, block_z = cute.arch.block_idx()
    i_h = block_x // spec.blocks
    start_v = block_x % spec.blocks * spec.tiles.block_v
    row = block_y + block_z * ROWS_PER_Z
    lane, warp = thread % 32, thread // 32
    threads = const_expr(32 * spec.tiles.num_warps)
    vector, lanes, repeats, lines, passes = spec.threads
    own = lane % lanes
    line = cute.assume((warp * lines + lane // lanes) * passes, divby=passes)
    team, i_t = thread // TEAM, cute.assume(thread % TEAM * spec.team_vector, divby=spec.team_vector)
    memory = cutlass.memory.SmemAllocator()
    s_q = memory.allocate_tensor(Float32, cute.make_layout((spec.K, DRAFTS)), 16)
    s_w = memory.allocate_tensor(Float32, cute.make_layout((DRAFTS, spec.places + 1, spec.places // DRAFTS)), 16)
    if const_expr(spec.state_layout == "kv"):
        s_o = memory.allocate_tensor(Float32, cute.make_layout((spec.tiles.block_v, spec.tiles.num_warps, DRAFTS)), 16)
    if row < s_offsets.shape[0]:
        slot, slots, places = Int64(s_offsets[row]), Int64(window_k.shape[0]), window_k.shape[1]
        slope, tokens = decay_scales[i_h], q.shape[1]
        if const_expr(spec.state_layout == "vk"):
            i_v, i_k = cute.assume(start_v + line, divby=passes), cute.assume(own * vector, divby=vector)
            inner = i_v * spec.K + i_k
            sharer = own
        else:
            i_v, i_k = cute.assume(start_v + own * vector, divby=vector), line
            inner = i_k * spec.V + i_v
            sharer = warp * lines + lane // lanes
        i_g = i_h // group
        live = (slot >= 0) & (slot < slots)
        g_q, q_stride = q[row, 0, i_g, None].iterator, q.stride[1]
        r_q = cute.make_rmem_tensor(cute.make_layout((RUN, spec.query_rounds)), q.element_type)
        if const_expr(not spec.overlap):
            load_queries(g_q, q_stride, tokens, thread, r_q, spec)
        first = s[i_h, None, None].iterator + cute.assume(inner, divby=vector)
        g_S = first + cute.assume(slot * slot_stride, divby=vector if const_expr(spec.aligned) else 1)
        r_S = cute.make_rmem_tensor(cute.make_layout((vector, repeats, passes)), s.element_type)
        load_states(g_S, r_S, live, spec)

        oldest, pending = read_cursors(start, length, slot, live, ring)
        if const_expr(spec.overlap):
            cute.arch.griddepcontrol_wait()
            load_queries(g_q, q_stride, tokens, thread, r_q, spec)
        drafts = tokens
        if const_expr(draft_lengths is not None):
            drafts = limited(draft_lengths, row, tokens)
        seen = drafts
        if (not live) | (pending + drafts > places):
            seen = Int32(0)
        g_wk, g_wv = window_k[slot, 0, i_g, None].iterator + i_t, window_v[slot, 0, i_h, None].iterator + i_v
        writes_k = (start_v == 0) & (i_h == i_g * group.divisor)
        of_one = window_k.element_type if const_expr(window_k.element_type == k.element_type) else Float32
        r_k = cute.make_rmem_tensor(cute.make_layout((spec.team_vector, spec.team_repeats, spec.keys_at_once)), of_one)
        r_v = cute.make_rmem_tensor(cute.make_layout((*spec.along_v, spec.value_rounds)), of_one)
        g_k, g_v = k[row, 0, i_g, None].iterator + i_t, v[row, 0, i_h, None].iterator + i_v
        keys = (g_wk, g_k, window_k.stride[1], k.stride[1])
        values = (g_wv, g_v, window_v.stride[1], v.stride[1])
        cursors = (oldest, pending, seen, places)
        chunks = (seen + DRAFTS - 1) // DRAFTS
        load_tokens(*keys, team, spec.teams, *cursors, r_k, spec.team_step, spec)
        load_tokens(*values, sharer, spec.sharers, *cursors, r_v, spec.repeat_step, spec)
        store_queries(r_q, s_q.iterator, thread, spec)
        store_drafts(g_wv, window_v.stride[1], sharer, spec.sharers, *cursors, r_v, spec.repeat_step, spec)
        cute.arch.sync_threads()
        for m in range_constexpr(0, spec.key_rounds, spec.keys_at_once):
            first_place = team + m * spec.teams
            if const_expr(m > 0):
                load_tokens(*keys, first_place, spec.teams, *cursors, r_k, spec.team_step, spec)
            if writes_k:
                store_drafts(g_wk, window_k.stride[1], first_place, spec.teams, *cursors, r_k, spec.team_step, spec)
            for c in cutlass.range(chunks, unroll=1):
                if (c > 0) | ((m > 0) & (chunks > 1)):
                    move_queries(g_q, q_stride, c, tokens, s_q.iterator, thread, spec)
                leave_weights(
                    r_k, s_q.iterator + i_t, s_w[None, None, c], first_place, c, *cursors, slope, thread, spec
                )
        cute.arch.sync_threads()
        r_o = cute.make_rmem_tensor(cute.make_layout((spec.along_v[0] * spec.along_v[1], DRAFTS)), Float32)
        for c in cutlass.range(chunks, unroll=1):
            if chunks > 1:
                move_queries(g_q, q_stride, c, tokens, s_q.iterator, thread, spec)
            state_products(r_S, s_q.iterator + i_k, r_o, spec)
            add_values(r_o, r_v, s_w[None, None, c].iterator, sharer, c, oldest, pending, places, spec)
            t_first = c * DRAFTS
            if const_expr(spec.state_layout == "vk"):
                spread_sums(r_o, own, TEAM)
                share = const_expr(max(1, passes * DRAFTS // TEAM))
                copies = const_expr(max(1, TEAM // (passes * DRAFTS)))
                index = own // copies * share
                t = t_first + index // passes
                if (own % copies == 0) & (t < seen):
                    for n in range_constexpr(share):
                        out[row, t, i_h, i_v + index % passes + n] = (r_o[n] * scale).to(out.element_type)
            else:
                share_outputs(r_o, thread, s_o, spec)
                cute.arch.sync_threads()
                for n in range_constexpr(spec.tiles.block_v * DRAFTS // threads):
                    index = thread + n * threads
                    column = index % spec.tiles.block_v
                    t = index // spec.tiles.block_v
                    b_o = s_o[column, 0, t]
                    for w in range_constexpr(1, spec.tiles.num_warps):
                        b_o = b_o + s_o[column, w, t]
                    if t_first + t < seen:
                        out[row, t_first + t, i_h, start_v + column] = (b_o * scale).to(out.element_type)
        for t in cutlass.range(seen, tokens, unroll=1):
            b_o = Float32(0.0)
            if live & (t < drafts):
                b_o = Float32(float("nan"))
            if thread < spec.tiles.block_v:
                out[row, t, i_h, start_v + thread] = b_o.to(out.element_type)


@cute.jit
def launch(
    s_offsets: cute.Tensor,
    s: cute.Tensor,
    decay_scales: cute.Tensor,
    q: cute.Tensor,
    k: cute.Tensor,
    v: cute.Tensor,
    out: cute.Tensor,
    window_k: cute.Tensor,
    window_v: cute.Tensor,
    start: cute.Tensor,
    length: cute.Tensor,
    draft_lengths: cute.Tensor | None,
    scale: Float32,
    stream,
    spec: cutlass.Constexpr,
):
    """Launch the kernel of `spec` on a stream; arguments as in the kernel."""
    heads, rows = v.shape[2], s_offsets.shape[0]
    slot_stride = Int64(heads) * s.stride[0]
    divisors = cute.FastDivmodDivisorV2(heads // q.shape[2]), cute.FastDivmodDivisorV2(window_k.shape[1])
    arguments = (s_offsets, s, decay_scales, q, k, v, out, window_k, window_v, start, length, draft_lengths)
    verify_kernel(*arguments, scale, slot_stride, *divisors, spec).launch(
        grid=(heads * spec.blocks, cutlass.min(rows, ROWS_PER_Z), (rows + ROWS_PER_Z - 1) // ROWS_PER_Z),
        block=(32 * spec.tiles.num_warps, 1, 1),
        stream=stream,
        use_pdl=spec.overlap,
        min_blocks_per_mp=spec.least_blocks,
        # Without it the DSL would ask the driver.
        preferred_smem_carveout=-1,
    )
