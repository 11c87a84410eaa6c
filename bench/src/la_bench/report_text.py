"""Wording of a report: numbers, lists, cells and the explanations that never change."""

from __future__ import annotations

from collections.abc import Sequence

from la_bench.rows import Row

STATUS_WORDS = {
    "ok": "ok",
    "checked": "right, not timed",
    "failed": "FAILED",
    "refused": "refused",
    "unavailable": "unavailable",
    "error": "ERROR",
    "interrupted": "interrupted",
}

FULL_COLUMNS = (
    "backend",
    "time per call",
    "p20 to p80",
    "samples",
    "GB/s",
    "share of copy",
    "copy floor",
    "share of floor",
    "vs ref",
    "vs fastest peer",
    "host time",
    "error of out",
    "error of state",
    "extra memory",
)

HOW_TO_READ = (
    (
        "Workload",
        "a released model under a load. A simulated serving engine hands out the slots: requests arrive, grow, finish "
        "and pass their slots on, and the running batch is padded with negative offsets to the next size that engines "
        "capture CUDA graphs for. Batches are taken from far apart in that trace.",
    ),
    (
        "Gate",
        "before anything is timed, a backend makes one call with the workload's first batch, dtypes, layout and "
        "slopes in a small pool full of NaN, and is judged against float64 per (row, head), with all memory that must "
        "not change compared bit by bit. A backend that fails has no time.",
    ),
    (
        "Time per call",
        "median, with the 20th and 80th percentile. A sample is one walk over all batches of the workload, divided by "
        "their number, so batches of different sizes do not widen the spread. Backends take turns within each round "
        "in one process. On a CPU it is wall time of la_core.decode with all checks on, on a GPU the time of a "
        "replayed CUDA graph.",
    ),
    (
        "Cold states",
        "a model's step goes through all of its linear layers, each with a pool and slopes of its own. Here, too, each "
        "call uses another layer's pool than the one before. To bound memory, the pools of some layers, spread over "
        "the model, take turns where not all fit; each workload says which, and how many bytes of states pass before "
        "one is touched again.",
    ),
    (
        "GB/s",
        "the fewest bytes that a call can move over its time: states of live rows read and written (a padding row "
        "moves no state), q, k, v, offsets and slopes read and the output written for all rows.",
    ),
    (
        "Share of copy bandwidth",
        "GB/s over the speed of a large eager copy (bytes read plus bytes written) that is made once per round, "
        "beside the calls. The copy floor is the time that the call's bytes would take at that speed.",
    ),
    ("vs ref", "how many times faster than la-ref on the same workload in the same rounds; 1.00x is la-ref itself."),
    (
        "Floor",
        "on a GPU, the in-place floor is the time of a kernel that only multiplies the same states in place, found "
        "through the same slots, the best of a handful of tiles. A share is the floor's time over the variant's; "
        "variants with overlap are set against the floor with overlap. It is a measured kernel, not a law: where "
        "another way to walk through the states suits the GPU better, a share can exceed 100 %.",
    ),
    (
        "Overlap",
        "a kernel may start while the one before it still runs: la_core.use_overlap. It pays where calls are short. "
        "Here the kernel before is another call of the same kind; in an engine it is another kernel, and the gain "
        "depends on it. Peers have no overlap.",
    ),
    (
        "Peers",
        "public kernels of others, called as their engines call them, through the same gate, and plain torch "
        "(torch-naive). What a peer leaves out or does differently is said beside its name. 'vs fastest peer' compares "
        "with the fastest of those that were timed.",
    ),
    (
        "Host time",
        "how long Python is busy with a call on a GPU, with all checks of la_core.decode on and launches not waited "
        "for, at the smallest batch.",
    ),
    (
        "Errors",
        "relative L2 error of the worst (row, head) against float64. An output in bfloat16 is rounded once, which "
        "alone is about 2e-3; states in float32 should stay near 1e-7.",
    ),
    (
        "Extra memory",
        "peak of what torch's allocator handed out during a call with the largest batch, arguments and output not "
        "counted.",
    ),
    (
        "Two reports",
        "compare medians only if their intervals from p20 to p80 are apart, and only on the same machine: "
        "la-bench diff does so, row by row.",
    ),
)

KERNELS_MADE = (
    "Kernels that each backend made ready over the whole run, and the seconds that this took: what the calls in which "
    "they were made cost beyond later ones. The first such call also imports the compiler, where one is needed. A "
    "kernel that was made for one variant or call is there for all that come after it."
)
"""Explains the table of kernels."""

GRID_TERMS = {
    "Gate": "before anything is timed, a variant makes one of the calls that are timed, on the same tensors. Up to six "
    "of its rows are judged against float64 per (row, head), and every slot that the call does not name is compared "
    "bit by bit. A variant that fails has no time.",
    "Time per call": "median over the rounds. A sample is one lap over all calls of a point, divided by their number. "
    "Variants take turns within each round in one process. On a GPU a lap is a replayed CUDA graph, on a CPU it is "
    "wall time of a few calls of the lap, with all checks of la_core.decode on.",
    "Cold states": "the calls of a lap name different slots of one pool, as long as it suffices, so that states come "
    "from memory. q, k, v and the output are the same in all calls and stay in the cache; they are less than 1 % of "
    "the bytes of a call with float32 states and 16-bit q, k, v and output, and up to 3 % with other dtypes.",
    "Copy floor": "the time that the fewest bytes of a call (states read and written, q, k, v, offsets and slopes "
    "read, the output written) would take at the speed of a large eager copy, made once per round beside the calls.",
    "Host time": "how long Python is busy with a call on a GPU, with all checks of la_core.decode on and launches not "
    "waited for, over points with few states.",
    "Extra memory": "peak of what torch's allocator handed out during a call, arguments and output not counted.",
}
"""What reads otherwise in a grid, or has no counterpart among workloads."""

HOW_TO_READ_GRID = tuple(
    (term, GRID_TERMS.get(term, text)) for term, text in (*HOW_TO_READ[1:4], ("Copy floor", ""), *HOW_TO_READ[7:])
)
"""Explanations of the report of a grid."""


def time(microseconds: float) -> str:
    """Three digits, in us or ms."""
    return f"{number(microseconds / 1e3)} ms" if microseconds >= 1e3 else f"{number(microseconds)} us"


def number(value: float) -> str:
    """Three significant digits without an exponent; whole numbers from 100 on."""
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def percent(share: float) -> str:
    """A share as a whole percentage."""
    return f"{share * 100:.0f} %"


def times(factor: float | None) -> str:
    """A speed-up."""
    return "-" if factor is None else f"{factor:.2f}x"


def span(low_and_high: Sequence[str]) -> str:
    """`low to high`, or one of them where both read the same."""
    return " to ".join(dict.fromkeys(low_and_high))


def error(relative: float | None) -> str:
    """A relative error."""
    return "-" if relative is None else f"{relative:.1e}"


def memory(count_of_bytes: float) -> str:
    """Bytes in MiB."""
    return f"{count_of_bytes / 2**20:.1f} MiB"


def count(n: int, noun: str) -> str:
    """`1 workload`, `2 workloads`."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def listing(names: Sequence[str]) -> str:
    """Names separated by commas."""
    return ", ".join(names)


def full_cells(row: Row) -> tuple[str, ...]:
    """Cells of `FULL_COLUMNS`; the status stands where the time would be if there is none."""
    result = row.result
    if result is None:
        cells = dict.fromkeys(FULL_COLUMNS, "-")
        if row.accuracy is not None:
            cells["error of out"], cells["error of state"] = map(
                error, (row.accuracy.out_error, row.accuracy.state_error)
            )
        return (row.backend.name, STATUS_WORDS[row.status], *list(cells.values())[2:])
    return (
        row.backend.name,
        time(result.time_us),
        f"{time(result.time_us_p20)} to {time(result.time_us_p80)}",
        str(result.samples),
        number(result.gb_per_s),
        percent(result.share_of_copy),
        time(result.copy_floor_us),
        "-" if result.share_of_floor is None else percent(result.share_of_floor),
        times(result.speedup_vs_ref),
        times(result.speedup_vs_peer),
        "-" if result.host_us is None else time(result.host_us),
        error(result.out_error),
        error(result.state_error),
        memory(result.extra_bytes),
    )
