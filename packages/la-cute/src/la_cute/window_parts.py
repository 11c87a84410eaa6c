# mypy: ignore-errors
"""What the kernels of the window operators share.

A thread's part of a state is [vector, repeats, passes], as in decode. What goes with its columns, of K with K
contiguous ("vk") or of V with V contiguous ("kv"), is [vector, repeats]; what goes with its lines is [passes, 1].
Products of a key with a query are sums over K in the 8 threads of a team, in one order in every tile.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr

from la_cute.kernel_parts import load_pieces, store_run, store_states, sum_over_lanes, sum_over_lines
from la_cute.window_tiles import TEAM


@cute.jit
def load_side(source: cute.Pointer, values: cute.Tensor, step: cutlass.Constexpr, spec: cutlass.Constexpr):
    """Load runs [run, repeats] that lie `step` elements apart, in the dtype of `values`."""
    for j in range_constexpr(cute.size(values, mode=[1])):
        load_pieces(source + j * step, values[None, j], spec)


@cute.jit
def store_side(values: cute.Tensor, target: cute.Pointer, step: cutlass.Constexpr, spec: cutlass.Constexpr):
    """Store runs [run, repeats] that lie `step` elements apart, in the dtype of `target`."""
    for j in range_constexpr(cute.size(values, mode=[1])):
        count = const_expr(min(spec.io_piece, cute.size(values, mode=[0])))
        bits = const_expr(count * target.dtype.width if spec.aligned else 0)
        for i in range_constexpr(cute.size(values, mode=[0]) // count):
            raw = cute.make_rmem_tensor(cute.make_layout(count), target.dtype)
            for n in range_constexpr(count):
                raw[n] = values[i * count + n, j].to(target.dtype)
            store_run(raw, target + j * step + i * count, bits)


@cute.jit
def keep_side(values: cute.Tensor, target: cute.Tensor, first: Int32, step: cutlass.Constexpr):
    """Put runs [run, repeats] that lie `step` elements apart, from `first` on, into a vector in shared memory."""
    for j in range_constexpr(cute.size(values, mode=[1])):
        run = cute.make_tensor(target.iterator + (first + j * step), values[None, j].layout)
        cute.autovec_copy(values[None, j], run)


@cute.jit
def take_side(source: cute.Tensor, values: cute.Tensor, first: Int32, step: cutlass.Constexpr):
    """Take runs [run, repeats] that lie `step` elements apart, from `first` on, from shared memory, as float32."""
    for j in range_constexpr(cute.size(values, mode=[1])):
        raw = cute.make_rmem_tensor(values[None, j].layout, source.element_type)
        cute.autovec_copy(cute.make_tensor(source.iterator + (first + j * step), raw.layout), raw)
        for n in range_constexpr(cute.size(raw)):
            values[n, j] = raw[n].to(Float32)


@cute.jit
def read_cursors(
    start: cute.Tensor,  # [P]
    length: cute.Tensor,  # [P]
    slot: Int64,
    live: cutlass.Boolean,
    places: Int32,
):
    """Start and length of a slot, brought to where they name places of its ring; an empty ring if it is not live."""
    first, count = Int32(0), Int32(0)
    if live:
        first, count = start[slot], length[slot]
        # A division takes as long as a load from L1, and no cursor that `advance` and `clear` wrote needs one.
        if (first < 0) | (first >= places):
            first = first % places
            if first < 0:
                first = first + places
        if count < 0:
            count = Int32(0)
        if count > places:
            count = places
    return first, count


@cute.jit
def limited(counts: cute.Tensor, row: Int32, most: Int32):
    """A count of a row, brought to 0 ... most."""
    count = counts[row]
    if count < 0:
        count = count.dtype(0)
    if count > most:
        count = count.dtype(most)
    return Int32(count)


@cute.jit
def wrapped(place: Int32, places: Int32):
    """A place of the ring for one that is at most one round behind its end, or before its beginning."""
    if place >= places:
        place = place - places
    if place < 0:
        place = place + places
    return place


@cute.jit
def widen_states(r_S: cute.Tensor, r_F: cute.Tensor, factor: Float32, spec: cutlass.Constexpr):
    """`r_F = factor * S`, a thread's part of it in float32."""
    columns = const_expr(cute.size(r_S) // spec.threads.passes)
    for i in range_constexpr(spec.threads.passes):
        for n in range_constexpr(columns):
            r_F[n + i * columns] = factor * r_S[n + i * columns].to(Float32)


@cute.jit
def store_states_rounded(r_F: cute.Tensor, g_S: cute.Pointer, live: cutlass.Boolean, spec: cutlass.Constexpr):
    """Store a thread's part of a state that is float32, if it is live."""
    r_S = cute.make_rmem_tensor(r_F.layout, g_S.dtype)
    columns = const_expr(cute.size(r_S) // spec.threads.passes)
    for i in range_constexpr(spec.threads.passes):
        for n in range_constexpr(columns):
            r_S[n + i * columns] = r_F[n + i * columns].to(g_S.dtype)
    store_states(r_S, g_S, live, spec)


@cute.jit
def decay(slope: Float32, tokens: Int32):
    """What is left of a state after some tokens."""
    return cute.math.exp(-slope * Float32(tokens), fastmath=False)


@cute.jit
def team_product(r_q: cute.Tensor, r_k: cute.Tensor):
    """A query times a key, in all threads of a team."""
    total = Float32(0.0)
    for n in range_constexpr(cute.size(r_q)):
        total = cute.math.fma(r_q[n], r_k[n].to(Float32), total)
    for step in range_constexpr(TEAM.bit_length() - 1):
        total = total + cute.arch.shuffle_sync_bfly(total, offset=TEAM >> (step + 1))
    return total


@cute.jit
def state_product(
    r_S: cute.Tensor,  # [vector, repeats, passes]
    r_q: cute.Tensor,  # along K
    r_o: cute.Tensor,  # along V
    factor: Float32,
    spec: cutlass.Constexpr,
):
    """`r_o = factor * S q`, a thread's part of the sum."""
    if const_expr(spec.state_layout == "vk"):
        for i in range_constexpr(spec.threads.passes):
            b_o = Float32(0.0)
            for n in range_constexpr(cute.size(r_q)):
                b_o = cute.math.fma(r_S[n + i * cute.size(r_q)].to(Float32), r_q[n], b_o)
            r_o[i] = factor * b_o
    else:
        r_o.fill(0.0)
        for i in range_constexpr(spec.threads.passes):
            for n in range_constexpr(cute.size(r_o)):
                r_o[n] = cute.math.fma(r_S[n + i * cute.size(r_o)].to(Float32), r_q[i], r_o[n])
        for n in range_constexpr(cute.size(r_o)):
            r_o[n] = factor * r_o[n]


@cute.jit
def sum_output(r_o: cute.Tensor, own: Int32, thread: Int32, s_o, spec: cutlass.Constexpr):
    """The sum over K for the row of V that this thread writes."""
    if const_expr(spec.state_layout == "vk"):
        total = sum_over_lanes(r_o, own, spec)
    else:
        total = sum_over_lines(r_o, thread, s_o, spec)
    return total
