# mypy: ignore-errors
"""What the kernels share: loads and stores of runs of values, and of a thread's part of a state."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr

ROWS_PER_Z = 32768
"""Rows on the second axis of the grid, which holds at most 65,535 blocks; the rest goes to the third."""

EVICT_FIRST, EVICT_LAST = 0x12F0000000000000, 0x14F0000000000000
"""What `createpolicy.fractional` makes of `L2::evict_first` and `L2::evict_last` for all of an access, encoded."""


@cute.jit
def load_run(source: cute.Pointer, values: cute.Tensor, bits: cutlass.Constexpr, policy: cutlass.Constexpr = None):
    """Load a run of values, `bits` at a time; 0 for one value at a time."""
    run = cute.make_tensor(source, values.layout)
    if const_expr(bits == 0):
        for n in range_constexpr(cute.size(values)):
            values[n] = run[n]
    else:
        atom = cute.make_copy_atom(cute.nvgpu.CopyG2ROp(), values.element_type, num_bits_per_copy=bits)
        if const_expr(policy is None):
            cute.copy(atom, run, values)
        else:
            cute.copy(atom, run, values, cache_policy=Int64(policy))


@cute.jit
def store_run(values: cute.Tensor, target: cute.Pointer, bits: cutlass.Constexpr):
    """Store a run of values, `bits` at a time; 0 for one value at a time."""
    run = cute.make_tensor(target, values.layout)
    if const_expr(bits == 0):
        for n in range_constexpr(cute.size(values)):
            run[n] = values[n]
    else:
        atom = cute.make_copy_atom(cute.nvgpu.CopyR2GOp(), values.element_type, num_bits_per_copy=bits)
        cute.copy(atom, values, run)


@cute.jit
def widen(values: cute.Tensor, widened: cute.Tensor, zero: Uint32 | None = None):
    """`widened = values` in float32, of registers one behind the other.

    A pair of bfloat16 is widened by two instructions; the compiler takes three for elements one by one. With a `zero`
    that it cannot know to be one, it widens them where this stands, and does not keep what it has widened before.
    """
    if const_expr(values.element_type is cutlass.BFloat16 and cute.size(values) % 2 == 0):
        pairs, bits = cute.recast_tensor(values, Uint32), cute.recast_tensor(widened, Uint32)
        for n in range_constexpr(cute.size(pairs)):
            pair = pairs[n] if const_expr(zero is None) else pairs[n] ^ zero
            bits[2 * n] = pair << Uint32(16)
            bits[2 * n + 1] = pair & Uint32(0xFFFF0000)
    else:
        for n in range_constexpr(cute.size(values)):
            widened[n] = values[n].to(Float32)


@cute.jit
def load_pieces(
    source: cute.Pointer, values: cute.Tensor, spec: cutlass.Constexpr, in_pairs: cutlass.Constexpr = False
):
    """Load q, k or v side by side in the dtype of `values`: up to 4 elements at a time.

    What is widened to float32 is so `in_pairs`, as by :func:`widen`, or one by one. That changes registers alone:
    decode needs more of them with pairs, and the operators with a window need fewer.
    """
    count = const_expr(min(spec.io_piece, cute.size(values)))
    bits = const_expr(count * source.dtype.width if spec.aligned else 0)
    for i in range_constexpr(cute.size(values) // count):
        raw = cute.make_rmem_tensor(cute.make_layout(count), source.dtype)
        load_run(source + i * count, raw, bits)
        if const_expr(in_pairs and values.element_type is Float32):
            piece = cute.make_tensor(values.iterator + i * count, raw.layout)
            widen(raw, piece)
        else:
            for n in range_constexpr(count):
                values[i * count + n] = raw[n].to(values.element_type)


@cute.jit
def load_states(g_S: cute.Pointer, r_S: cute.Tensor, live: cutlass.Boolean, spec: cutlass.Constexpr):
    """Load a thread's part of a state, [vector, repeats, passes], from its first value on; zeros if it is not live."""
    r_S.fill(0)
    if live:
        for i in range_constexpr(spec.threads.passes):
            for j in range_constexpr(spec.threads.repeats):
                at = i * spec.line_step + j * spec.repeat_step
                load_run(g_S + at, r_S[None, j, i], spec.state_bits, spec.load_policy)


@cute.jit
def store_states(r_S: cute.Tensor, g_S: cute.Pointer, live: cutlass.Boolean, spec: cutlass.Constexpr):
    """Store a thread's part of a state, [vector, repeats, passes], from its first value on, if it is live."""
    if live:
        for i in range_constexpr(cute.size(r_S, mode=[2])):
            for j in range_constexpr(spec.threads.repeats):
                at = i * spec.line_step + j * spec.repeat_step
                store_run(r_S[None, j, i], g_S + at, spec.state_bits)


@cute.jit
def sum_over_lanes(r_o: cute.Tensor, own: Int32, spec: cutlass.Constexpr):
    """Sum over the lanes of a line; the output of this thread's row `own`."""
    for n in range_constexpr(spec.steps):
        for i in range_constexpr(spec.threads.passes):
            r_o[i] = r_o[i] + cute.arch.shuffle_sync_bfly(r_o[i], offset=spec.threads.lanes >> (n + 1))
    # All lanes of a line have its sum; each keeps that of one line, so that one store writes them all.
    mine = r_o[0]
    for i in range_constexpr(1, spec.threads.passes):
        if own == i:
            mine = r_o[i]
    return mine


@cute.jit
def spread_sums(values: cute.Tensor, lane: Int32, lanes: cutlass.Constexpr):
    """Sum each of `values` over some lanes; every lane keeps its share of the sums, in the order of the lanes.

    A lane gives away half of what it has and takes the other half of its partner's, so a sum takes less than one
    shuffle. If there are fewer sums than lanes, lanes side by side keep the same one. A sum has the bits that
    :func:`sum_over_lanes` gives it.
    """
    count = const_expr(cute.size(values))
    for step in range_constexpr(lanes.bit_length() - 1):
        offset = const_expr(lanes >> (step + 1))
        half = const_expr(max(count >> (step + 1), 1))
        if const_expr(count >> step > 1):
            upper = lane // offset % 2 == 1
            for n in range_constexpr(half):
                kept, given = values[n], values[n + half]
                if upper:
                    kept, given = values[n + half], values[n]
                values[n] = kept + cute.arch.shuffle_sync_bfly(given, offset=offset)
        else:
            values[0] = values[0] + cute.arch.shuffle_sync_bfly(values[0], offset=offset)


@cute.jit
def gather_outputs(
    b_o: Float32,
    row: Int32,
    has_row: cutlass.Boolean,
    thread: Int32,
    s_o: cute.Tensor,  # [block_v, 1] in shared memory
    spec: cutlass.Constexpr,
):
    """Bring the outputs of a block together, each from a thread that has the sum of a row; that of row `thread`."""
    if has_row:
        s_o[row, 0] = b_o
    cute.arch.sync_threads()
    return s_o[thread % spec.tiles.block_v, 0]


@cute.jit
def sum_over_lines(
    r_o: cute.Tensor,
    thread: Int32,
    s_o: cute.Tensor,  # [block_v, num_warps] in shared memory
    spec: cutlass.Constexpr,
):
    """Sum over the lines of a warp, then over the warps; the output of row `thread` of the block."""
    lane, warp = thread % 32, thread // 32
    for j in range_constexpr(spec.threads.repeats):
        for n in range_constexpr(spec.threads.vector):
            b_o = r_o[n, j]
            for step in range_constexpr(spec.steps):
                b_o = b_o + cute.arch.shuffle_sync_bfly(b_o, offset=16 >> step)
            if lane < spec.threads.lanes:
                s_o[j * spec.repeat_step + lane * spec.threads.vector + n, warp] = b_o
    cute.arch.sync_threads()
    total = s_o[thread % spec.tiles.block_v, 0]
    for w in range_constexpr(1, spec.tiles.num_warps):
        total = total + s_o[thread % spec.tiles.block_v, w]
    return total
