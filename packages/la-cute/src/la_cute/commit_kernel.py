# mypy: ignore-errors
"""commit as one CuTe DSL kernel, for one layer or all of a model: tokens of the windows are brought into the states.

For every row b with slot p = s_offsets[b] in [0, P), n = length[p] pending tokens and a = accepted[b] drafts behind
them (limited to 0 ... N - n), every layer and every head h of group g = h // (H // G):

    S[v,k] = exp(-d(n+a)) S[v,k] + sum_{i < n+a} exp(-d(n+a-1-i)) v_i[v] k_i[k]

if n + a + room > N, and if there is something to bring in; other rows neither read nor write their state. Layouts as in
decode; window.k [P, N, G, K] and window.v [P, N, H, V], with a stride between layers. fold is a commit of no drafts.

One thread block owns `block_v` rows of V of one (layer, row, head), and `tiles_of_block` times as many that follow, one
tile behind the other: few blocks, so that rows with nothing to bring in cost little. It leaves the keys and the decayed
values of up to `tokens_at_once` tokens in shared memory in float32, for all of its tiles if there are no more tokens.
Each tile is loaded once, takes the tokens one by one in registers, and is stored once.

Nothing races. Windows and cursors are only read, and each block reads and writes its own part of the states.

Limits are those of the decode kernel, with any number of places.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr

from la_cute.decode_tiles import IO_PIECE
from la_cute.kernel_parts import ROWS_PER_Z, load_pieces, load_states
from la_cute.verify_parts import load_shared, store_shared
from la_cute.window_parts import decay, limited, read_cursors, store_states_rounded, widen_states, wrapped


@cute.jit
def _load_tokens(
    g_place: cute.Pointer,  # place 0
    stride: Int64,  # elements between places
    oldest: Int32,
    first: Int32,
    count: Int32,
    places: Int32,
    thread: Int32,
    raw: cute.Tensor,  # [IO_PIECE, rounds]
    size: cutlass.Constexpr,  # elements of a token
    spec: cutlass.Constexpr,
):
    """Load this thread's pieces of the tokens from `first` on, as many as there are and fit; zeros behind them."""
    pieces = const_expr(size // IO_PIECE)
    raw.fill(0)
    for n in range_constexpr(cute.size(raw, mode=[1])):
        index = thread + n * 32 * spec.tiles.num_warps
        token = index // pieces
        if (token < spec.tokens_at_once) & (first + token < count):
            place = Int64(wrapped(oldest + first + token, places))
            at = cute.assume(index % pieces * IO_PIECE, divby=IO_PIECE)
            load_pieces(g_place + place * stride + at, raw[None, n], spec)


@cute.jit
def _store_tokens(
    raw: cute.Tensor,  # [IO_PIECE, rounds]
    target: cute.Pointer,
    later: Int32,
    slope: Float32 | None,
    thread: Int32,
    size: cutlass.Constexpr,
    spec: cutlass.Constexpr,
):
    """Leave them in shared memory; with a slope, what is left of them after `later` tokens less one for each."""
    pieces = const_expr(size // IO_PIECE)
    for n in range_constexpr(cute.size(raw, mode=[1])):
        index = thread + n * 32 * spec.tiles.num_warps
        widened = cute.make_rmem_tensor(cute.make_layout(IO_PIECE), Float32)
        for i in range_constexpr(IO_PIECE):
            widened[i] = raw[i, n].to(Float32)
        if const_expr(slope is not None):
            factor = decay(slope, cutlass.max(later - index // pieces, 0))
            for i in range_constexpr(IO_PIECE):
                widened[i] = factor * widened[i]
        if index < spec.tokens_at_once * pieces:
            store_shared(widened, target + cute.assume(index * IO_PIECE, divby=IO_PIECE))


@cute.jit
def _move_tokens(
    g_wk: cute.Pointer,  # place 0
    g_wv: cute.Pointer,
    k_stride: Int64,  # elements between places
    v_stride: Int64,
    oldest: Int32,
    count: Int32,
    places: Int32,
    first: Int32,
    slope: Float32,
    p_k: cute.Pointer,  # of shared memory
    p_v: cute.Pointer,
    thread: Int32,
    spec: cutlass.Constexpr,
):
    """Put the tokens from `first` on in the place of others, when all threads are done with those."""
    rounds_k, rounds_v = spec.token_rounds
    raw_k = cute.make_rmem_tensor(cute.make_layout((IO_PIECE, rounds_k)), g_wk.dtype)
    raw_v = cute.make_rmem_tensor(cute.make_layout((IO_PIECE, rounds_v)), g_wv.dtype)
    _load_tokens(g_wk, k_stride, oldest, first, count, places, thread, raw_k, spec.K, spec)
    _load_tokens(g_wv, v_stride, oldest, first, count, places, thread, raw_v, spec.rows_of_block, spec)
    cute.arch.sync_threads()
    _store_tokens(raw_k, p_k, count - 1 - first, None, thread, spec.K, spec)
    _store_tokens(raw_v, p_v, count - 1 - first, slope, thread, spec.rows_of_block, spec)
    cute.arch.sync_threads()


@cute.jit
def _add_tokens(
    r_F: cute.Tensor,  # [vector, repeats, passes] float32
    p_k: cute.Pointer,  # this thread's first elements in shared memory
    p_v: cute.Pointer,
    count: Int32,
    spec: cutlass.Constexpr,
):
    """Bring tokens whose values have decayed already into a thread's part of a state."""
    passes = spec.threads.passes
    columns = const_expr(cute.size(r_F) // passes)
    r_k = cute.make_rmem_tensor(cute.make_layout(spec.along_k), Float32)
    r_v = cute.make_rmem_tensor(cute.make_layout(spec.along_v), Float32)
    for t in cutlass.range(count, unroll=1):
        of_k = cute.assume(t * spec.K, divby=spec.K)
        of_v = cute.assume(t * spec.rows_of_block, divby=spec.tiles.block_v)
        for j in range_constexpr(spec.along_k[1]):
            load_shared(p_k + of_k + j * spec.repeat_step, r_k[None, j])
        for j in range_constexpr(spec.along_v[1]):
            load_shared(p_v + of_v + j * spec.repeat_step, r_v[None, j])
        for i in range_constexpr(passes):
            for n in range_constexpr(columns):
                if const_expr(spec.state_layout == "vk"):
                    r_F[n + i * columns] = cute.math.fma(r_v[i], r_k[n], r_F[n + i * columns])
                else:
                    r_F[n + i * columns] = cute.math.fma(r_v[n], r_k[i], r_F[n + i * columns])


@cute.kernel
def commit_kernel(
    s_offsets: cute.Tensor,  # [B]
    s: cute.Tensor,  # [P*H, V, K] of the first layer
    decay_scales: cute.Tensor,  # [H] float32 of the first layer; those of the next follow
    window_k: cute.Tensor,  # [P, N, G, K] of the first layer
    window_v: cute.Tensor,  # [P, N, H, V] of the first layer
    start: cute.Tensor,  # [P] int32
    length: cute.Tensor,  # [P] int32
    accepted: cute.Tensor | None,  # [B]
    accepted_of_all: Int32,  # without that tensor
    room: Int32,
    slot_stride: Int64,  # elements between slots of s
    s_layer: Int64,  # elements between layers
    k_layer: Int64,
    v_layer: Int64,
    heads: cute.FastDivmodDivisorV2,  # H
    group: cute.FastDivmodDivisorV2,  # H // G
    ring: cute.FastDivmodDivisorV2,  # N
    spec: cutlass.Constexpr,
):
    """The module says what it computes; letters and shapes are those of the parameters above."""
    thread, _, _ = cute.arch.thread_idx()
    block_x, block_y, block_z = cute.arch.block_idx()
    i_lh = block_x // spec.blocks
    start_v = block_x % spec.blocks * spec.rows_of_block
    row = block_y + block_z * ROWS_PER_Z
    vector, lanes, repeats, lines, passes = spec.threads
    memory = cutlass.memory.SmemAllocator()
    s_k = memory.allocate_tensor(Float32, cute.make_layout((spec.K, spec.tokens_at_once)), 16)
    s_v = memory.allocate_tensor(Float32, cute.make_layout((spec.rows_of_block, spec.tokens_at_once)), 16)
    if row < s_offsets.shape[0]:
        slot, slots, places = Int64(s_offsets[row]), Int64(window_k.shape[0]), window_k.shape[1]
        live = (slot >= 0) & (slot < slots)
        oldest, pending = read_cursors(start, length, slot, live, ring)
        brought = accepted_of_all
        if const_expr(accepted is not None):
            brought = limited(accepted, row, places)
        count = pending + cutlass.min(brought, places - pending)
        if live & (count > 0) & (count + room > places):
            i_l = i_lh // heads
            i_h = i_lh - i_l * heads.divisor
            layer = Int64(i_l)
            lane, warp = thread % 32, thread // 32
            own = lane % lanes
            line = cute.assume((warp * lines + lane // lanes) * passes, divby=passes)
            if const_expr(spec.state_layout == "vk"):
                i_v, i_k = line, cute.assume(own * vector, divby=vector)
                inner = (start_v + i_v) * spec.K + i_k
                tile_step = const_expr(spec.tiles.block_v * spec.K)
            else:
                i_v, i_k = cute.assume(own * vector, divby=vector), line
                inner = i_k * spec.V + start_v + i_v
                tile_step = const_expr(spec.tiles.block_v)
            slope = (decay_scales.iterator + i_lh)[0]
            unit = vector if const_expr(spec.aligned) else 1
            piece = spec.io_piece if const_expr(spec.aligned) else 1
            first = s[i_h, None, None].iterator + cute.assume(inner, divby=vector)
            g_S = first + cute.assume(slot * slot_stride, divby=unit) + cute.assume(layer * s_layer, divby=unit)
            g_wk = window_k[slot, 0, i_h // group, None].iterator + cute.assume(layer * k_layer, divby=piece)
            g_wv = window_v[slot, 0, i_h, None].iterator + cute.assume(layer * v_layer, divby=piece)
            r_S = cute.make_rmem_tensor(cute.make_layout((vector, repeats, passes)), s.element_type)
            r_F = cute.make_rmem_tensor(cute.make_layout((vector, repeats, passes)), Float32)
            g_rows = g_wv + cute.assume(start_v, divby=spec.rows_of_block)
            tokens = (g_wk, g_rows, window_k.stride[1], window_v.stride[1], oldest, count, places)
            p_k, p_v = s_k.iterator, s_v.iterator
            for tile in cutlass.range(spec.tiles.tiles_of_block, unroll=1):
                g_tile = g_S + cute.assume(tile * tile_step, divby=tile_step)
                load_states(g_tile, r_S, live, spec)
                # With few tokens they stay where they are for all tiles.
                if (tile == 0) | (count > spec.tokens_at_once):
                    _move_tokens(*tokens, Int32(0), slope, p_k, p_v, thread, spec)
                widen_states(r_S, r_F, decay(slope, count), spec)
                p_tile = p_v + cute.assume(tile * spec.tiles.block_v, divby=spec.tiles.block_v) + i_v
                _add_tokens(r_F, p_k + i_k, p_tile, cutlass.min(count, spec.tokens_at_once), spec)
                for begin in cutlass.range(spec.tokens_at_once, count, spec.tokens_at_once, unroll=1):
                    _move_tokens(*tokens, begin, slope, p_k, p_v, thread, spec)
                    here = cutlass.min(count - begin, spec.tokens_at_once)
                    _add_tokens(r_F, p_k + i_k, p_tile, here, spec)
                store_states_rounded(r_F, g_tile, live, spec)


@cute.jit
def launch(
    s_offsets: cute.Tensor,
    s: cute.Tensor,
    decay_scales: cute.Tensor,
    window_k: cute.Tensor,
    window_v: cute.Tensor,
    start: cute.Tensor,
    length: cute.Tensor,
    accepted: cute.Tensor | None,
    accepted_of_all: Int32,
    room: Int32,
    layers: Int32,
    s_layer: Int64,
    k_layer: Int64,
    v_layer: Int64,
    stream,
    spec: cutlass.Constexpr,
):
    """Launch the kernel of `spec` on a stream; arguments as in the kernel."""
    heads, rows = window_v.shape[2], s_offsets.shape[0]
    slot_stride = Int64(heads) * s.stride[0]
    counts = heads, heads // window_k.shape[2], window_k.shape[1]
    divisors = [cute.FastDivmodDivisorV2(count) for count in counts]
    arguments = (s_offsets, s, decay_scales, window_k, window_v, start, length, accepted, accepted_of_all, room)
    commit_kernel(*arguments, slot_stride, s_layer, k_layer, v_layer, *divisors, spec).launch(
        grid=(layers * heads * spec.blocks, cutlass.min(rows, ROWS_PER_Z), (rows + ROWS_PER_Z - 1) // ROWS_PER_Z),
        block=(32 * spec.tiles.num_warps, 1, 1),
        stream=stream,
        min_blocks_per_mp=spec.least_blocks,
        # Without it the DSL would ask the driver.
        preferred_smem_carveout=-1,
    )
