# mypy: ignore-errors
"""What the verify kernel does to a few drafts side by side: `DRAFTS` of them, so that one wait serves them all.

The queries of the drafts lie in shared memory in float32, [K, DRAFTS]; so do the weights, [DRAFTS, places], and behind
them, as those of one more place, the decays of the state. Every sum is taken in one order, whatever the tile and
wherever a draft stands.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr

from la_cute.kernel_parts import load_pieces, spread_sums
from la_cute.window_parts import decay, load_side, store_side, wrapped
from la_cute.window_tiles import DRAFTS, TEAM

RUN = 4
"""Float32 values side by side that a thread moves from or to shared memory at a time."""


@cute.jit
def load_shared(source: cute.Pointer, values: cute.Tensor):
    """Load a run of float32 values from shared memory."""
    count = const_expr(min(RUN, cute.size(values)))
    atom = cute.make_copy_atom(cute.nvgpu.CopyS2ROp(), Float32, num_bits_per_copy=32 * count)
    for i in range_constexpr(cute.size(values) // count):
        raw = cute.make_rmem_tensor(cute.make_layout(count), Float32)
        cute.copy(atom, cute.make_tensor(source + i * count, raw.layout), raw)
        for n in range_constexpr(count):
            values[i * count + n] = raw[n]


@cute.jit
def store_shared(values: cute.Tensor, target: cute.Pointer):
    """Store `RUN` values in shared memory in float32."""
    raw = cute.make_rmem_tensor(cute.make_layout(RUN), Float32)
    for n in range_constexpr(RUN):
        raw[n] = values[n].to(Float32)
    atom = cute.make_copy_atom(cute.nvgpu.CopyR2SOp(), Float32, num_bits_per_copy=32 * RUN)
    cute.copy(atom, raw, cute.make_tensor(target, raw.layout))


@cute.jit
def load_queries(
    g_q: cute.Pointer,  # of the first of the drafts
    t_stride: Int64,  # elements between drafts
    drafts: Int32,
    thread: Int32,
    r_q: cute.Tensor,  # [RUN, rounds] in the dtype of q
    spec: cutlass.Constexpr,
):
    """Load this thread's runs of the queries of up to `DRAFTS` drafts; zeros behind the last."""
    runs = const_expr(spec.K // RUN)
    r_q.fill(0)
    for n in range_constexpr(cute.size(r_q, mode=[1])):
        index = thread + n * 32 * spec.tiles.num_warps
        t = index // runs
        if t < cutlass.min(drafts, DRAFTS):
            at = cute.assume(index % runs * RUN, divby=RUN)
            load_pieces(g_q + t * t_stride + at, r_q[None, n], spec)


@cute.jit
def store_queries(r_q: cute.Tensor, p_q: cute.Pointer, thread: Int32, spec: cutlass.Constexpr):
    """Leave them in shared memory."""
    for n in range_constexpr(cute.size(r_q, mode=[1])):
        index = thread + n * 32 * spec.tiles.num_warps
        if index < DRAFTS * spec.K // RUN:
            store_shared(r_q[None, n], p_q + cute.assume(index * RUN, divby=RUN))


@cute.jit
def move_queries(
    g_q: cute.Pointer,  # of draft 0
    t_stride: Int64,
    chunk: Int32,
    tokens: Int32,
    p_q: cute.Pointer,
    thread: Int32,
    spec: cutlass.Constexpr,
):
    """Put the queries of a chunk in the place of another's, when all threads are done with those."""
    r_q = cute.make_rmem_tensor(cute.make_layout((RUN, spec.query_rounds)), g_q.dtype)
    first = chunk * DRAFTS
    load_queries(g_q + first * t_stride, t_stride, tokens - first, thread, r_q, spec)
    cute.arch.sync_threads()
    store_queries(r_q, p_q, thread, spec)
    cute.arch.sync_threads()


@cute.jit
def load_tokens(
    g_place: cute.Pointer,  # this thread's part of place 0
    g_input: cute.Pointer,  # and of draft 0
    place_stride: Int64,
    draft_stride: Int64,
    first: Int32,
    step: cutlass.Constexpr,
    oldest: Int32,
    pending: Int32,
    drafts: Int32,
    places: Int32,
    values: cute.Tensor,  # [run, repeats, rounds]
    run_step: cutlass.Constexpr,
    spec: cutlass.Constexpr,
):
    """Load a thread's part of the keys or values of the places `first`, `first + step`, ...; zeros for unused ones.

    Those of a pending token come from its place, those of a draft from the input. With one dtype a single load does,
    which nothing has to wait for yet.
    """
    values.fill(0)
    for n in range_constexpr(cute.size(values, mode=[2])):
        place = first + n * step
        draft = wrapped(place - oldest, places) - pending
        is_pending, is_draft = (place < places) & (draft < 0), (place < places) & (draft >= 0) & (draft < drafts)
        source, other = g_place + Int64(place) * place_stride, g_input + Int64(draft) * draft_stride
        if const_expr(source.dtype == other.dtype):
            if is_draft:
                source = other
            if is_pending | is_draft:
                load_side(source, values[None, None, n], run_step, spec)
        else:
            if is_pending:
                load_side(source, values[None, None, n], run_step, spec)
            if is_draft:
                load_side(other, values[None, None, n], run_step, spec)


@cute.jit
def store_drafts(
    g_place: cute.Pointer,  # this thread's part of place 0
    place_stride: Int64,
    first: Int32,
    step: cutlass.Constexpr,
    oldest: Int32,
    pending: Int32,
    drafts: Int32,
    places: Int32,
    values: cute.Tensor,  # [run, repeats, rounds]
    run_step: cutlass.Constexpr,
    spec: cutlass.Constexpr,
):
    """Store what :func:`load_tokens` has loaded of drafts in their places."""
    for n in range_constexpr(cute.size(values, mode=[2])):
        place = first + n * step
        draft = wrapped(place - oldest, places) - pending
        if (place < places) & (draft >= 0) & (draft < drafts):
            store_side(values[None, None, n], g_place + Int64(place) * place_stride, run_step, spec)


@cute.jit
def leave_weights(
    r_k: cute.Tensor,  # [run, repeats, rounds]
    p_q: cute.Pointer,  # this thread's first element in shared memory
    s_w: cute.Tensor,  # [DRAFTS, places + 1]
    first: Int32,
    chunk: Int32,
    oldest: Int32,
    pending: Int32,
    drafts: Int32,
    places: Int32,
    slope: Float32,
    thread: Int32,
    spec: cutlass.Constexpr,
):
    """Leave the weights that a team's places have in the outputs of a chunk, and the decays of the state."""
    rounds = const_expr(cute.size(r_k, mode=[2]))
    r_w = cute.make_rmem_tensor(cute.make_layout((DRAFTS, rounds)), Float32)
    team_products(r_k, p_q, r_w, spec)
    # All lanes of a team sum for all drafts; each keeps the sum for one, which those beside it keep as well.
    lane, same = thread % TEAM, const_expr(TEAM // DRAFTS)
    mine = lane // same
    t = chunk * DRAFTS + mine
    for n in range_constexpr(rounds):
        place = first + n * spec.teams
        later = t - (wrapped(place - oldest, places) - pending)
        spread_sums(r_w[None, n], lane, TEAM)
        weight = r_w[0, n] * decay(slope, cutlass.max(later, 0))
        if (place >= places) | (later < 0):
            weight = Float32(0.0)
        if (lane % same == 0) & (place < spec.places):
            s_w[mine, place] = weight
    if thread < DRAFTS:
        s_w[thread, spec.places] = decay(slope, pending + chunk * DRAFTS + thread + 1)


@cute.jit
def team_products(
    r_k: cute.Tensor,  # [run, repeats, rounds]
    p_q: cute.Pointer,
    r_w: cute.Tensor,  # [DRAFTS, rounds]
    spec: cutlass.Constexpr,
):
    """A thread's part of each key times the query of each draft; a query is loaded once for all keys."""
    r_q = cute.make_rmem_tensor(cute.make_layout(spec.team_vector), Float32)
    r_w.fill(0.0)
    for j in range_constexpr(spec.team_repeats):
        for t in range_constexpr(DRAFTS):
            load_shared(p_q + t * spec.K + j * spec.team_step, r_q)
            for m in range_constexpr(cute.size(r_w, mode=[1])):
                for n in range_constexpr(spec.team_vector):
                    r_w[t, m] = cute.math.fma(r_q[n], r_k[n, j, m].to(Float32), r_w[t, m])


@cute.jit
def state_products(
    r_S: cute.Tensor,  # [vector, repeats, passes]
    p_q: cute.Pointer,  # this thread's first element in shared memory
    r_o: cute.Tensor,  # [rows of V, DRAFTS]
    spec: cutlass.Constexpr,
):
    """A thread's part of a state times the query of each draft."""
    vector, repeats, passes = spec.threads.vector, spec.threads.repeats, spec.threads.passes
    r_o.fill(0.0)
    if const_expr(spec.state_layout == "vk"):
        r_q = cute.make_rmem_tensor(cute.make_layout(vector), Float32)
        for j in range_constexpr(repeats):
            for t in range_constexpr(DRAFTS):
                load_shared(p_q + t * spec.K + j * spec.repeat_step, r_q)
                for i in range_constexpr(passes):
                    for n in range_constexpr(vector):
                        r_o[i, t] = cute.math.fma(r_S[n, j, i].to(Float32), r_q[n], r_o[i, t])
    else:
        run = const_expr(min(RUN, passes))
        r_q = cute.make_rmem_tensor(cute.make_layout(run), Float32)
        for i in range_constexpr(0, passes, run):
            for t in range_constexpr(DRAFTS):
                load_shared(p_q + t * spec.K + i, r_q)
                for m in range_constexpr(run):
                    for n in range_constexpr(vector * repeats):
                        state = r_S[n + (i + m) * vector * repeats].to(Float32)
                        r_o[n, t] = cute.math.fma(state, r_q[m], r_o[n, t])


@cute.jit
def add_values(
    r_o: cute.Tensor,  # [rows of V, DRAFTS]
    r_v: cute.Tensor,  # [run, repeats, rounds]
    p_w: cute.Pointer,  # the weights
    sharer: Int32,
    chunk: Int32,
    oldest: Int32,
    pending: Int32,
    places: Int32,
    spec: cutlass.Constexpr,
):
    """`r_o = decay * r_o + weights * v`, of the places of this thread."""
    rows = const_expr(cute.size(r_o, mode=[0]))
    r_w = cute.make_rmem_tensor(cute.make_layout(DRAFTS), Float32)
    load_shared(p_w + DRAFTS * spec.places, r_w)
    for t in range_constexpr(DRAFTS):
        for n in range_constexpr(rows):
            r_o[n, t] = r_w[t] * r_o[n, t]
    for m in range_constexpr(spec.value_rounds):
        place = sharer + m * spec.sharers
        if place < spec.places:
            load_shared(p_w + cute.assume(place * DRAFTS, divby=DRAFTS), r_w)
            draft = wrapped(place - oldest, places) - pending
            for t in range_constexpr(DRAFTS):
                # Later drafts are not even multiplied by zero: they may be NaN.
                if draft <= chunk * DRAFTS + t:
                    for n in range_constexpr(rows):
                        r_o[n, t] = cute.math.fma(r_w[t], r_v[n + m * rows].to(Float32), r_o[n, t])


@cute.jit
def share_outputs(
    r_o: cute.Tensor,  # [vector, repeats, DRAFTS]
    thread: Int32,
    s_o: cute.Tensor,  # [block_v, num_warps, DRAFTS] in shared memory
    spec: cutlass.Constexpr,
):
    """V contiguous: sum over the lines of a warp, and leave what each warp has in shared memory."""
    lane, warp = thread % 32, thread // 32
    for t in range_constexpr(DRAFTS):
        for j in range_constexpr(spec.threads.repeats):
            for n in range_constexpr(spec.threads.vector):
                b_o = r_o[n + j * spec.threads.vector, t]
                for step in range_constexpr(spec.steps):
                    b_o = b_o + cute.arch.shuffle_sync_bfly(b_o, offset=16 >> step)
                if lane < spec.threads.lanes:
                    s_o[j * spec.repeat_step + lane * spec.threads.vector + n, warp, t] = b_o
