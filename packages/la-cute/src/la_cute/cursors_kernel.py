# mypy: ignore-errors
"""advance and clear as one CuTe DSL kernel: the cursors of the named slots move.

For every row b with slot p = s_offsets[b] in [0, P), n = length[p] pending tokens and a = accepted[b] (limited to
0 ... N - n):

    advance:  length[p] = 0 if n = N and accepted[b] > 0, else n + a
    clear:    start[p] = (start[p] + n + a) % N, length[p] = 0, if n + a + room > N

clear has a = 0 and does nothing else; advance does so first, with room = 0 if none is asked for.

Nothing races: one thread has a row, and reads and writes the cursors of its slot alone.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from la_cute.window_parts import limited, read_cursors

THREADS = 128


@cute.kernel
def cursors_kernel(
    s_offsets: cute.Tensor,  # [B]
    start: cute.Tensor,  # [P] int32
    length: cute.Tensor,  # [P] int32
    accepted: cute.Tensor | None,  # [B]
    accepted_of_all: Int32,  # without that tensor
    ring: cute.FastDivmodDivisorV2,  # N
    room: Int32,
    clears: Int32,  # 1 for clear, 0 for advance
):
    """The module says what it computes; letters and shapes are those of the parameters above."""
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    row = block * THREADS + thread
    if row < s_offsets.shape[0]:
        slot, places = Int64(s_offsets[row]), Int32(ring.divisor)
        if (slot >= 0) & (slot < Int64(start.shape[0])):
            oldest, pending = read_cursors(start, length, slot, cutlass.Boolean(True), ring)
            more = accepted_of_all
            if const_expr(accepted is not None):
                more = limited(accepted, row, places)
            count = cutlass.min(pending + more, places)
            if count + room > places:
                behind = oldest + count
                if behind >= places:
                    behind = behind - places
                start[slot] = behind
                length[slot] = Int32(0)
            elif clears == 0:
                if (pending == places) & (more > 0):
                    count = Int32(0)
                length[slot] = count


@cute.jit
def launch(
    s_offsets: cute.Tensor,
    start: cute.Tensor,
    length: cute.Tensor,
    accepted: cute.Tensor | None,
    accepted_of_all: Int32,
    places: Int32,
    room: Int32,
    clears: Int32,
    stream,
):
    """Launch the kernel on a stream; arguments as in the kernel."""
    arguments = (s_offsets, start, length, accepted, accepted_of_all)
    cursors_kernel(*arguments, cute.FastDivmodDivisorV2(places), room, clears).launch(
        grid=((s_offsets.shape[0] + THREADS - 1) // THREADS, 1, 1), block=(THREADS, 1, 1), stream=stream
    )
