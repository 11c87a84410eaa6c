# mypy: ignore-errors
"""decode with a window as one CuTe DSL kernel.

For every row b with slot p = s_offsets[b] in [0, P), n = length[p] pending tokens of ages i = 0 ... n-1, and head h of
group g = h // (H // G):

    o[b,h,v] = scale * (exp(-d(n+1)) sum_k S[v,k] q[k] + sum_i exp(-d(n-i)) (k_i q) v_i[v] + (k q) v[v])

    n < N:  place (start + n) % N of the window = k, v
    n = N:  S = exp(-d(n+1)) S + sum_i exp(-d(n-i)) v_i k_i^T + v k^T

and zero for every other row. Layouts as in decode; window.k [P, N, G, K] and window.v [P, N, H, V].

One thread block owns `block_v` rows of V of one (row, head), in registers from one load of 16-byte pieces. Its address
does not depend on the cursors. The new token counts as one more at the place where it is written, or behind the ring if
that is full. Each team of 8 threads takes some places, multiplies their keys with q, and leaves their weights in shared
memory; then the threads that share a sum take one place each and add its weight times their part of v. So the tokens
cost one pass over their keys in a block, whatever rows it owns, and large blocks are the better ones.

A full window comes into a float32 state where that is, in registers, and into a 16-bit one in a float32 copy of as many
lines at a time as registers allow: what a multiprocessor has under way is bounded by them. Its tokens are kept in
shared memory for that, where they fit.

Nothing races. Blocks read pending places, those of ages below n; a row that is not full writes the place of age n,
which is none of them: k by the block of the group's first head and the state's first rows, v by its owner. A full
row writes no place, and each block writes the part of the state that it alone has read. Cursors are only read.

K and V of 64, 128 and 256. Batch, pool, heads, strides, places, cursors, scale and pointers are run-time values; a
kernel is made for up to 7, 15, 31, 63 or 127 places.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from la_cute.kernel_parts import ROWS_PER_Z, load_states, widen
from la_cute.window_parts import (
    decay,
    keep_side,
    load_side,
    read_cursors,
    state_product,
    store_side,
    store_states_rounded,
    sum_output,
    take_side,
    team_product,
    widen_states,
    wrapped,
)
from la_cute.window_tiles import TEAM


@cute.jit
def _load_tokens(
    g_place: cute.Pointer,  # this thread's part of place 0
    place_stride: Int64,
    g_new: cute.Pointer,  # and of the new token
    first: Int32,
    step: cutlass.Constexpr,
    cursors,
    values: cute.Tensor,  # [run, repeats, rounds]
    run_step: cutlass.Constexpr,
    with_new: cutlass.Constexpr,
    spec: cutlass.Constexpr,
):
    """Load a thread's part of the pending tokens at the places `first`, `first + step`, ..., and of the new one."""
    oldest, pending, places, new = cursors
    for n in range_constexpr(cute.size(values, mode=[2])):
        place = first + n * step
        wanted = (place < places) & (wrapped(place - oldest, places) < pending)
        source = g_place + Int64(place) * place_stride
        if const_expr(with_new):
            wanted = wanted | (place == new)
            if place == new:
                source = g_new
        if wanted:
            load_side(source, values[None, None, n], run_step, spec)


@cute.jit
def _load_new_token(
    g_new: cute.Pointer,
    first: Int32,
    step: cutlass.Constexpr,
    new: Int32,
    values: cute.Tensor,  # [run, repeats, rounds]
    run_step: cutlass.Constexpr,
    spec: cutlass.Constexpr,
):
    """Load a thread's part of the new token, if one of the places `first`, `first + step`, ... is its."""
    for n in range_constexpr(cute.size(values, mode=[2])):
        if first + n * step == new:
            load_side(g_new, values[None, None, n], run_step, spec)


@cute.jit
def _weigh(r_w: cute.Tensor, team: Int32, cursors, slope: Float32, spec: cutlass.Constexpr):
    """`exp(-d*(n - i))` for the tokens at the places of a team, and zero where there is none."""
    oldest, pending, places, new = cursors
    for n in range_constexpr(spec.key_rounds):
        place = team + n * spec.teams
        age = wrapped(place - oldest, places)
        if place == new:
            age = pending
        r_w[n] = decay(slope, cutlass.max(pending - age, 0))
        if ((place >= places) & (place != new)) | (age > pending):
            r_w[n] = Float32(0.0)


@cute.jit
def _stage(r_wk: cute.Tensor, r_wv: cute.Tensor, tokens, starts, numbers, spec: cutlass.Constexpr):
    """If a window is full, put its tokens and the new one, which threads hold in parts, into shared memory: `k_i` and
    `exp(-d*(n - i)) * v_i`, in float32. The new one is of age n and lies behind the ring.
    """
    s_k, s_v = tokens
    team, i_t, sharer, own_v = starts
    full, oldest, pending, slope = numbers
    if full:
        for n in range_constexpr(spec.key_rounds):
            if team + n * spec.teams < spec.places:
                keep_side(r_wk[None, None, n], s_k[None, team + n * spec.teams], i_t, spec.team_step, Float32(1.0))
        for n in range_constexpr(spec.value_rounds):
            place = sharer + n * spec.sharers
            age = wrapped(place - oldest, pending)
            if place == pending:
                age = pending
            if place <= pending:
                weight = decay(slope, pending - age)
                keep_side(r_wv[None, None, n], s_v[None, place], own_v, spec.repeat_step, weight)


@cute.jit
def _add_token(r_F: cute.Tensor, r_l: cute.Tensor, r_c: cute.Tensor, factor):
    """`F += factor * l c^T`, on lines `l` and columns `c` of a thread's part."""
    for i in range_constexpr(cute.size(r_l)):
        b_l = r_l[i] if const_expr(factor is None) else r_l[i] * factor
        for n in range_constexpr(cute.size(r_c)):
            r_F[n + i * cute.size(r_c)] = cute.math.fma(b_l, r_c[n], r_F[n + i * cute.size(r_c)])


@cute.jit
def _fold(r_S: cute.Tensor, g_S: cute.Pointer, tokens, token, starts, numbers, spec: cutlass.Constexpr):
    """Store a thread's part of the state with the tokens of a full window and the new one, a few lines at a time."""
    s_k, s_v, g_wk, g_wv, k_stride, v_stride = tokens
    g_k, g_v = token
    i_k, own_v = starts
    oldest, pending, carry, slope = numbers
    vk = const_expr(spec.state_layout == "vk")
    columns = const_expr(cute.size(r_S) // spec.threads.passes)
    lines = const_expr((spec.threads.vector, spec.threads.repeats, spec.fold_lines))
    r_F = cute.make_rmem_tensor(cute.make_layout(lines), Float32)
    r_c = cute.make_rmem_tensor(cute.make_layout((spec.threads.vector, spec.threads.repeats)), Float32)
    r_l = cute.make_rmem_tensor(cute.make_layout((spec.fold_lines, 1)), Float32)
    zero = Uint32(pending) >> Uint32(31)
    for first in range_constexpr(0, spec.threads.passes, spec.fold_lines):
        widen_states(cute.make_tensor(r_S.iterator + first * columns, r_F.layout), r_F, carry, spec, zero)
        if const_expr(spec.staged):
            for age in cutlass.range(pending + 1):
                place = wrapped(oldest + age, pending)
                if age == pending:
                    place = pending
                take_side(s_k[None, place] if vk else s_v[None, place], r_c, i_k if vk else own_v, spec.repeat_step)
                take_side(s_v[None, place] if vk else s_k[None, place], r_l, (own_v if vk else i_k) + first, 1)
                _add_token(r_F, r_l, r_c, None)
        else:
            for age in cutlass.range(pending):
                place = wrapped(oldest + age, pending)
                g_pk, g_pv = g_wk + Int64(place) * k_stride, g_wv + Int64(place) * v_stride
                load_side(g_pk if vk else g_pv, r_c, spec.repeat_step, spec)
                load_side((g_pv if vk else g_pk) + first, r_l, 1, spec)
                _add_token(r_F, r_l, r_c, decay(slope, pending - age))
            load_side(g_k if vk else g_v, r_c, spec.repeat_step, spec)
            load_side((g_v if vk else g_k) + first, r_l, 1, spec)
            _add_token(r_F, r_l, r_c, None)
        store_states_rounded(r_F, g_S + first * spec.line_step, cutlass.Boolean(True), spec)


@cute.kernel
def window_decode_kernel(
    s_offsets: cute.Tensor,  # [B]
    s: cute.Tensor,  # [P*H, V, K]
    decay_scales: cute.Tensor,  # [H] float32
    q: cute.Tensor,  # [B, G, K]
    k: cute.Tensor,  # [B, G, K]
    v: cute.Tensor,  # [B, H, V]
    out: cute.Tensor,  # [B, H, V]
    window_k: cute.Tensor,  # [P, N, G, K]
    window_v: cute.Tensor,  # [P, N, H, V]
    start: cute.Tensor,  # [P] int32
    length: cute.Tensor,  # [P] int32
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
    vector, lanes, _, lines, passes = spec.threads
    own = lane % lanes
    line = cute.assume((warp * lines + lane // lanes) * passes, divby=passes)
    team, i_t = thread // TEAM, cute.assume(thread % TEAM * spec.team_vector, divby=spec.team_vector)
    memory = cutlass.memory.SmemAllocator()
    s_w = memory.allocate_tensor(Float32, cute.make_layout(spec.places), 16)
    s_k = s_v = None
    if const_expr(spec.staged):
        s_k = memory.allocate_tensor(Float32, cute.make_layout((spec.K, spec.places)), 16)
        s_v = memory.allocate_tensor(Float32, cute.make_layout((spec.tiles.block_v, spec.places)), 16)
    s_o = None
    if const_expr(spec.state_layout == "kv"):
        s_o = memory.allocate_tensor(Float32, cute.make_layout((spec.tiles.block_v, spec.tiles.num_warps)), 16)
    if row < s_offsets.shape[0]:
        slot, slots, places = Int64(s_offsets[row]), Int64(window_k.shape[0]), window_k.shape[1]
        slope = decay_scales[i_h]
        if const_expr(spec.state_layout == "vk"):
            i_v, i_k = cute.assume(start_v + line, divby=passes), cute.assume(own * vector, divby=vector)
            inner = i_v * spec.K + i_k
            i_o, writes = i_v + own, own < passes
            sharer, own_v = own, line
        else:
            i_v, i_k = cute.assume(start_v + own * vector, divby=vector), line
            inner = i_k * spec.V + i_v
            i_o, writes = start_v + thread, thread < spec.tiles.block_v
            sharer, own_v = warp * lines + lane // lanes, cute.assume(own * vector, divby=vector)
        i_g = i_h // group
        live = (slot >= 0) & (slot < slots)
        g_q, g_k = q[row, i_g, None].iterator, k[row, i_g, None].iterator
        g_v = v[row, i_h, None].iterator + i_v
        r_qt = cute.make_rmem_tensor(cute.make_layout((spec.team_vector, spec.team_repeats)), Float32)
        r_q = r_qt
        if const_expr(spec.state_layout == "kv"):
            r_q = cute.make_rmem_tensor(cute.make_layout(spec.along_k), Float32)
        if const_expr(not spec.overlap):
            load_side(g_q + i_t, r_qt, spec.team_step, spec)
            if const_expr(spec.state_layout == "kv"):
                load_side(g_q + i_k, r_q, spec.repeat_step, spec)
        first = s[i_h, None, None].iterator + cute.assume(inner, divby=vector)
        g_S = first + cute.assume(slot * slot_stride, divby=vector if const_expr(spec.aligned) else 1)
        r_S = cute.make_rmem_tensor(cute.make_layout((vector, spec.threads.repeats, passes)), s.element_type)
        load_states(g_S, r_S, live, spec)

        oldest, pending = read_cursors(start, length, slot, live, ring)
        g_wk, g_wv = window_k[slot, 0, i_g, None].iterator, window_v[slot, 0, i_h, None].iterator + i_v
        k_stride, v_stride = window_k.stride[1], window_v.stride[1]
        early_rounds = const_expr(spec.key_rounds if spec.early_keys else 1)
        r_wk = cute.make_rmem_tensor(
            cute.make_layout((spec.team_vector, spec.team_repeats, early_rounds)), window_k.element_type
        )
        r_wv = cute.make_rmem_tensor(cute.make_layout((*spec.along_v, spec.value_rounds)), window_v.element_type)
        r_wk.fill(0)
        r_wv.fill(0)
        full = pending == places
        new = wrapped(oldest + pending, places)
        if full:
            new = places
        cursors = (oldest, pending, places, new)
        keys, values = (g_wk + i_t, k_stride, g_k + i_t), (g_wv, v_stride, g_v)
        # With one dtype, a single load takes a token from where it is: a second one into the same registers waits.
        at_once = const_expr(not spec.overlap and window_k.element_type == k.element_type)
        if const_expr(spec.early_keys):
            _load_tokens(*keys, team, spec.teams, cursors, r_wk, spec.team_step, at_once, spec)
        _load_tokens(*values, sharer, spec.sharers, cursors, r_wv, spec.repeat_step, at_once, spec)
        r_w = cute.make_rmem_tensor(cute.make_layout(spec.key_rounds), Float32)
        if const_expr(spec.overlap):
            # Through shared memory and by prefetches, since the compiler moves arithmetic behind the wait otherwise.
            _weigh(r_w, team, cursors, slope, spec)
            for n in range_constexpr(spec.key_rounds):
                if (thread % TEAM == 0) & (team + n * spec.teams < spec.places):
                    s_w[team + n * spec.teams] = r_w[n]
            for address in (g_q + i_t, g_k + i_t, g_v):
                cute.arch.prefetch(address.llvm_ptr, cache_level="L2")
            cute.arch.griddepcontrol_wait()
            load_side(g_q + i_t, r_qt, spec.team_step, spec)
            if const_expr(spec.state_layout == "kv"):
                load_side(g_q + i_k, r_q, spec.repeat_step, spec)
        if const_expr(not at_once):
            if const_expr(spec.early_keys):
                _load_new_token(g_k + i_t, team, spec.teams, new, r_wk, spec.team_step, spec)
            _load_new_token(g_v, sharer, spec.sharers, new, r_wv, spec.repeat_step, spec)
        if const_expr(spec.staged):
            _stage(r_wk, r_wv, (s_k, s_v), (team, i_t, sharer, own_v), (full, oldest, pending, slope), spec)
        if const_expr(not spec.overlap):
            # Behind that branch: further up the compiler lets the loads of the window wait for those of the state.
            _weigh(r_w, team, cursors, slope, spec)
        for n in range_constexpr(spec.key_rounds):
            place = team + n * spec.teams
            r_key = r_wk[None, None, n if const_expr(spec.early_keys) else 0]
            if const_expr(not spec.early_keys):
                r_key.fill(0)
                if place == new:
                    load_side(g_k + i_t, r_key, spec.team_step, spec)
                elif r_w[n] != 0.0:
                    load_side(g_wk + i_t + Int64(place) * k_stride, r_key, spec.team_step, spec)
            weight = team_product(r_qt, r_key)
            if (thread % TEAM == 0) & (place < spec.places):
                factor = s_w[place] if const_expr(spec.overlap) else r_w[n]
                # Infinity in q may meet no token here.
                s_w[place] = weight * factor if factor != 0.0 else Float32(0.0)
        r_o = cute.make_rmem_tensor(cute.make_layout(spec.along_v), Float32)
        r_v = cute.make_rmem_tensor(cute.make_layout(spec.along_v), Float32)
        carry = decay(slope, pending + 1)
        state_product(r_S, r_q, r_o, carry, spec)
        cute.arch.sync_threads()
        for m in range_constexpr(spec.value_rounds):
            place = sharer + m * spec.sharers
            if place < spec.places:
                weight = s_w[place]
                widen(r_wv[None, None, m], r_v)
                for n in range_constexpr(cute.size(r_o)):
                    r_o[n] = cute.math.fma(weight, r_v[n], r_o[n])
        b_o = sum_output(r_o, own, thread, s_o, spec) * scale
        if not live:
            b_o = Float32(0.0)
        if writes:
            out[row, i_h, i_o] = b_o.to(out.element_type)

        if full:
            tokens = (s_k, s_v, g_wk + i_k, g_wv, k_stride, v_stride)
            _fold(r_S, g_S, tokens, (g_k + i_k, g_v), (i_k, own_v), (oldest, pending, carry, slope), spec)
        elif live:
            for n in range_constexpr(spec.value_rounds):
                if sharer + n * spec.sharers == new:
                    store_side(r_wv[None, None, n], g_wv + Int64(new) * v_stride, spec.repeat_step, spec)
            if (start_v == 0) & (i_h == i_g * group.divisor):
                for n in range_constexpr(spec.key_rounds):
                    r_key = r_wk[None, None, n if const_expr(spec.early_keys) else 0]
                    if team + n * spec.teams == new:
                        if const_expr(not spec.early_keys):
                            load_side(g_k + i_t, r_key, spec.team_step, spec)
                        store_side(r_key, g_wk + i_t + Int64(new) * k_stride, spec.team_step, spec)


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
    scale: Float32,
    stream,
    spec: cutlass.Constexpr,
):
    """Launch the kernel of `spec` on a stream; arguments as in the kernel."""
    heads, rows = v.shape[1], s_offsets.shape[0]
    slot_stride = Int64(heads) * s.stride[0]
    divisors = cute.FastDivmodDivisorV2(heads // q.shape[1]), cute.FastDivmodDivisorV2(window_k.shape[1])
    arguments = (s_offsets, s, decay_scales, q, k, v, out, window_k, window_v, start, length)
    window_decode_kernel(*arguments, scale, slot_stride, *divisors, spec).launch(
        grid=(heads * spec.blocks, cutlass.min(rows, ROWS_PER_Z), (rows + ROWS_PER_Z - 1) // ROWS_PER_Z),
        block=(32 * spec.tiles.num_warps, 1, 1),
        stream=stream,
        use_pdl=spec.overlap,
        min_blocks_per_mp=spec.least_blocks,
        preferred_smem_carveout=-1,
    )
