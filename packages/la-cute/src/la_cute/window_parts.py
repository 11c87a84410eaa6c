# mypy: ignore-errors
"""What the kernels of the window operators share.

A thread's part of a state is [vector, repeats, passes], as in decode. What goes with its columns, of K with K
contiguous ("vk") or of V with V contiguous ("kv"), is [vector, repeats]; what goes with its lines is [passes, 1].
Products of a key with a query are sums over K in the 8 threads of a team, in one order in every tile.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from la_cute.kernel_parts import load_pieces, store_run, store_states, sum_over_lanes, sum_over_lines, widen
from la_cute.window_tiles import TEAM


@cute.jit
def load_side(source: cute.Pointer, values: cute.Tensor, step: cutlass.Constexpr, spec: cutlass.Constexpr):
    """Load runs [run, repeats] that lie `step` elements apart, in the dtype of `values`."""
    for j in range_constexpr(cute.size(values, mode=[1])):
        load_pieces(source + j * step, values[None, j], spec, True)


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
def keep_side(values: cute.Tensor, target: cute.Tensor, first: Int32, step: cutlass.Constexpr, factor):
    """Put `factor` times runs [run, repeats] into a float32 vector in shared memory: `step` elements apart, from
    `first` on.
    """
    for j in range_constexpr(cute.size(values, mode=[1])):
        run = cute.make_rmem_tensor(values[None, j].layout, Float32)
        widen(values[None, j], run)
        for n in range_constexpr(cute.size(run)):
            run[n] = factor * run[n]
        cute.autovec_copy(run, cute.make_tensor(target.iterator + (first + j * step), run.layout))


@cute.jit
def take_side(source: cute.Tensor, values: cute.Tensor, first: Int32, step: cutlass.Constexpr):
    """Take float32 runs [run, repeats] that lie `step` elements apart, from `first` on, from shared memory."""
    for j in range_constexpr(cute.size(values, mode=[1])):
        run = cute.make_rmem_tensor(values[None, j].layout, Float32)
        cute.autovec_copy(cute.make_tensor(source.iterator + (first + j * step), run.layout), run)
        for n in range_constexpr(cute.size(run)):
            values[n, j] = run[n]


@cute.jit
def read_cursors(
    start: cute.Tensor,  # [P]
    length: cute.Tensor,  # [P]
    slot: Int64,
    live: cutlass.Boolean,
    ring: cute.FastDivmodDivisorV2,  # N
):
    """Start and length of a slot, brought to where they name places of its ring; an empty ring if it is not live."""
    first, count, places = Int32(0), Int32(0), Int32(ring.divisor)
    if live:
        first, count = start[slot], length[slot]
        # Modulo N, also of a negative start: ~x = -1 - x is not. All of it in this branch: else the compiler lets one
        # scoreboard wait for the cursors and for the states.
        sign = first >> 31
        first = Int32((first ^ sign) % ring)
        first = (first ^ sign) + (places & sign)
        count = cutlass.min(cutlass.max(count, Int32(0)), places)
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
def widen_states(
    r_S: cute.Tensor, r_F: cute.Tensor, factor: Float32, spec: cutlass.Constexpr, zero: Uint32 | None = None
):
    """`r_F = factor * S`, lines of a thread's part of it, [vector, repeats, lines], in float32."""
    for i in range_constexpr(cute.size(r_F, mode=[2])):
        widen(r_S[None, None, i], r_F[None, None, i], zero)
        for j in range_constexpr(spec.threads.repeats):
            for n in range_constexpr(spec.threads.vector):
                r_F[n, j, i] = factor * r_F[n, j, i]


@cute.jit
def store_states_rounded(r_F: cute.Tensor, g_S: cute.Pointer, live: cutlass.Boolean, spec: cutlass.Constexpr):
    """Store lines of a thread's part of a state that are float32, [vector, repeats, lines], if it is live."""
    r_S = cute.make_rmem_tensor(r_F.layout, g_S.dtype)
    for i in range_constexpr(cute.size(r_F, mode=[2])):
        for j in range_constexpr(spec.threads.repeats):
            for n in range_constexpr(spec.threads.vector):
                r_S[n, j, i] = r_F[n, j, i].to(g_S.dtype)
    store_states(r_S, g_S, live, spec)


@cute.jit
def decay(slope: Float32, tokens: Int32):
    """What is left of a state after some tokens."""
    return cute.math.exp(-slope * Float32(tokens), fastmath=False)


@cute.jit
def team_product(r_q: cute.Tensor, r_k: cute.Tensor):
    """A query times a key, in all threads of a team."""
    r_F = cute.make_rmem_tensor(r_q.layout, Float32)
    widen(r_k, r_F)
    # Side by side, since each product waits for the sum that it is added to.
    sums = [Float32(0.0)] * const_expr(min(4, cute.size(r_q)))
    for n in range_constexpr(cute.size(r_q)):
        sums[n % len(sums)] = cute.math.fma(r_q[n], r_F[n], sums[n % len(sums)])
    total = sums[0]
    for n in range_constexpr(1, len(sums)):
        total = total + sums[n]
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
    r_F = cute.make_rmem_tensor(r_S[None, None, 0].layout, Float32)
    if const_expr(spec.state_layout == "vk"):
        for i in range_constexpr(spec.threads.passes):
            widen(r_S[None, None, i], r_F)
            b_o = Float32(0.0)
            for n in range_constexpr(cute.size(r_q)):
                b_o = cute.math.fma(r_F[n], r_q[n], b_o)
            r_o[i] = factor * b_o
    else:
        r_o.fill(0.0)
        for i in range_constexpr(spec.threads.passes):
            widen(r_S[None, None, i], r_F)
            for n in range_constexpr(cute.size(r_o)):
                r_o[n] = cute.math.fma(r_F[n], r_q[i], r_o[n])
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
