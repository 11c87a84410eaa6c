"""The program `la-bench`.

Exit status: 0 done, 1 a result is wrong, over its limit or not written, 2 a wrong option, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from la_bench.errors import UsageError
from la_bench.grid_spec import CPU_GRID, DEFAULT_GRID, DTYPE_NAMES, parse_grid
from la_bench.version import __version__
from la_bench.window_spec import DECODE, OPS

COMMAND_MODULES = {
    "compare": "compare_command",
    "tune": "tune_command",
    "first": "first_command",
    "host": "commands",
    "ref": "commands",
    "diff": "file_commands",
    "records": "file_commands",
    "report": "file_commands",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return the exit status."""
    options = _parser().parse_args(arguments)
    # torch, matplotlib and rich take seconds to import: after --help and mistyped options have been dealt with.
    module = importlib.import_module(f"la_bench.{COMMAND_MODULES[options.command]}")
    try:
        return int(getattr(module, options.command)(options))
    except UsageError as reason:
        sys.stderr.write(f"la-bench {options.command}: {reason}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write(f"la-bench {options.command}: stopped by Ctrl-C.\n")
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="la-bench", description="Measures the backends of Lightning Attention over a state pool."
    )
    parser.add_argument("--version", action="version", version=f"la-bench {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    compare = commands.add_parser(
        "compare",
        help="run all backends on workloads or a grid of sizes and write a report",
        description="Run every available backend on named workloads or a grid of sizes, correctness first, and write "
        "report.md, report.html and rows.jsonl. On a GPU they run with and without overlap, beside the in-place floor "
        "and public kernels of others. Exit status 1 if a backend is wrong or raises, or if none has a result.",
    )
    _add_op(compare, "a step of verify", "are compared side by side")
    compare.add_argument(
        "--layers",
        type=_count,
        metavar="L",
        help="layers that share the launches of commit_layers and, for verify, of advance (default: 1 for verify, 4 "
        "for commit)",
    )
    compare.add_argument("--backends", type=_names, default=(), metavar="A,B", help="backends to run (default: all)")
    compare.add_argument(
        "--workloads",
        type=_names,
        default=(),
        metavar="W1,W2",
        help="names, beginnings of names, or all (default: all on a CPU, and --grid on a GPU)",
    )
    compare.add_argument(
        "--quick", action="store_true", help="few samples, and fewer loads or points where none are named"
    )
    compare.add_argument(
        "--out", type=_path, default=Path("report"), metavar="DIR", help="folder to write to (default: report)"
    )
    compare.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: cuda if there is one"
    )
    compare.add_argument("--seed", type=_seed, default=0, metavar="N", help="of traces and values (default: 0)")
    compare.add_argument(
        "--peers",
        type=_names,
        default=(),
        metavar="A,B",
        help="public kernels of others to time beside them, or none (default: all on a GPU, none on a CPU)",
    )
    compare.add_argument(
        "--peer",
        type=_named_path,
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="take a peer from a .py file, or from the folder that holds its package; can be given several times",
    )
    compare.add_argument(
        "--grid",
        type=_grid,
        nargs="?",
        const=(),
        metavar="H,H..xB,B..",
        help="instead of workloads: full batches of all these heads and rows, K = V = 128, slots in random order "
        f"(default: {DEFAULT_GRID}, which is what runs on a GPU if no workloads are named; {CPU_GRID} on a CPU; "
        "--quick and operators with a window have smaller grids of their own)",
    )
    compare.add_argument("--dtype", choices=DTYPE_NAMES, help="of q, k, v and out, of --grid (default: bfloat16)")
    compare.add_argument("--state-dtype", choices=DTYPE_NAMES, help="of --grid (default: float32)")
    compare.add_argument(
        "--layout", choices=("vk", "kv"), help="of --grid: which axis of a state comes first (default: vk)"
    )
    compare.add_argument("--list", action="store_true", help="list workloads and backends, and run nothing")

    _add_diff(commands)
    report = commands.add_parser(
        "report",
        help="write the report of rows that were measured before",
        description="Write report.md, report.html and the plots of a file of rows: of a run that was killed, or of a "
        "record. The same rows give the same bytes.",
    )
    report.add_argument("rows", type=Path, metavar="ROWS", help="a rows.jsonl of la-bench compare")
    report.add_argument(
        "--out", type=_path, default=Path("report"), metavar="DIR", help="folder to write to (default: report)"
    )
    records = commands.add_parser(
        "records",
        help="which records of runs on real cards there are, and which are stale",
        description="List every record of a run on a real card: what ran, on which versions, and whether the sources "
        "that ran have changed since. A stale record is no failure: the exit status is 0.",
    )
    records.add_argument(
        "--folder", type=Path, metavar="DIR", help="default: bench/records of the checkout that la-bench lies in"
    )
    _add_tune(commands)
    _add_first(commands)
    host = commands.add_parser(
        "host",
        help="what the operators cost from Python",
        description="Time la_core.decode and the operators with a window around a backend that does nothing, with all "
        "checks on, against torch.add of a one-element CPU tensor in the same process.",
    )
    host.add_argument(
        "--max-ratio", type=_positive, metavar="X", help="exit with status 1 if a main figure exceeds X times torch.add"
    )
    host.add_argument("--samples", type=_count, default=60, metavar="N", help="samples of each variant (default: 60)")

    ref = commands.add_parser(
        "ref",
        help="what la-ref costs on a CPU",
        description="Time la-ref's decode of 64 rows, 16 heads, K = V = 128 on the CPU against s.mul_(a) over the same "
        "float32 states in the same process.",
    )
    ref.add_argument(
        "--max-ratio",
        type=_positive,
        metavar="X",
        help="exit with status 1 if decode exceeds X times mul_, in turn over one pool of 64 slots",
    )
    ref.add_argument("--blocks", action="store_true", help="sweep la-ref's block size instead")
    ref.add_argument("--rounds", type=_count, default=30, metavar="N", help="samples of each (default: 30)")
    return parser


def _add_op(command: argparse.ArgumentParser, verify: str, several: str) -> None:
    """What is measured of an operator with a window."""
    command.add_argument(
        "--op",
        choices=OPS,
        default=DECODE,
        help=f"what is measured: decode; deferred, which is decode with a window; {verify}; commit (default: decode)",
    )
    command.add_argument(
        "--window",
        type=_counts,
        default=(),
        metavar="N,N",
        help=f"places of the window: several sizes {several} (default: 7,15 for deferred, 16 for verify and commit)",
    )
    command.add_argument(
        "--drafts", type=_count, metavar="T", help="draft tokens of a row, for verify and commit (default: 4)"
    )


def _add_tune(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    tune = commands.add_parser(
        "tune",
        help="which tiles of the backends are the fastest, on a GPU",
        description="Time every choice of tiles of a backend over 8 to 16384 states in a call, K = V = 128, cold slots "
        "in random order, set the present choice against the best, and print the shortest choice that is near the "
        "best. Of an operator with a window its kernel alone is timed, at random phases of the windows.",
    )
    _add_op(tune, "verify", "are tuned one after the other")
    tune.add_argument(
        "--backend",
        type=_names,
        default=("triton",),
        metavar="A,B",
        help="one after the other; all: every installed one that has tiles to choose from (default: triton)",
    )
    tune.add_argument(
        "--tiles",
        type=_tiles,
        default=(),
        metavar="KIB,KIB..xW,W..",
        help="only tiles of these KiB of states in a block and these warps, and the present choice (default: all)",
    )
    tune.add_argument("--layout", choices=("vk", "kv"), default="vk", help="of the states (default: vk)")
    tune.add_argument("--state-dtype", choices=DTYPE_NAMES, default="float32", help="default: float32")
    tune.add_argument("--overlap", action="store_true", help="with overlap of kernels")
    tune.add_argument(
        "--units", type=_counts, metavar="N,N", help="states in a call, heads x rows (default: 8, 16, ... 16384)"
    )
    tune.add_argument(
        "--heads", type=_count, metavar="H", help="of every call (default: 8, and more where 512 rows do not suffice)"
    )
    tune.add_argument("--out", type=_path, metavar="FILE", help="write a JSON line for each N and choice of tiles")


def _add_first(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    first = commands.add_parser(
        "first",
        help="what the first call of a process costs",
        description="Time the first decode call of fresh processes beside a later one, imports not counted: as the "
        "backend is installed (nothing cached, prebuilt kernels if it has them), with its kernels in the disk cache, "
        "and with neither. Folders of caches are temporary; nobody's own cache is read or written.",
    )
    first.add_argument("--backend", required=True, metavar="NAME", help="the backend")
    first.add_argument(
        "--modes", type=_names, default=(), metavar="A,B", help="of installed, warm, cold (default: all it has)"
    )
    first.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: cuda if there is one"
    )
    first.add_argument("--samples", type=_count, default=5, metavar="N", help="processes of each mode (default: 5)")
    first.add_argument(
        "--max-ms",
        type=_positive,
        metavar="X",
        help="exit with status 1 if a first call takes more than X ms longer than a later one, by the medians",
    )
    first.add_argument("--out", type=_path, metavar="FILE", help="write a JSON line for each mode")


def _add_diff(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    diff = commands.add_parser(
        "diff",
        help="what became faster, slower or wrong between two runs",
        description="Compare the rows of two runs on one machine. A row is FASTER or SLOWER if the intervals from p20 "
        "to p80 are apart, SAME if each holds the other's median, and UNCLEAR otherwise. Exit status 1 if a backend "
        "became SLOWER or WRONG or lost its time (NO TIME) anywhere; peers and floors do not count there.",
    )
    diff.add_argument("old", type=Path, metavar="OLD", help="rows.jsonl of the run before")
    diff.add_argument("new", type=Path, metavar="NEW", help="rows.jsonl of the run after")
    diff.add_argument(
        "--resolution",
        type=_positive,
        default=1.0,
        metavar="PERCENT",
        help="an interval spans at least this share of the median to both sides (default: 1)",
    )
    diff.add_argument("--any-machine", action="store_true", help="also if the runs come from two machines")


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _path(text: str) -> Path:
    # Path("") is the current folder, which nobody means who passes an empty variable.
    if not text:
        raise argparse.ArgumentTypeError("must not be empty")
    return Path(text)


def _named_path(text: str) -> tuple[str, Path]:
    name, separator, path = text.partition("=")
    if not (name and separator and path):
        raise argparse.ArgumentTypeError(f"must be NAME=PATH, got {text!r}")
    return name, Path(path)


def _grid(text: str) -> tuple[tuple[int, int], ...]:
    try:
        return parse_grid(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be heads x rows such as 8,16x1,64, got {text!r}") from None


def _tiles(text: str) -> tuple[tuple[int, int], ...]:
    try:
        return parse_grid(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be KiB x warps such as 8,16x2,4, got {text!r}") from None


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text}")
    return value


def _count(text: str) -> int:
    return _whole(text, 1, "must be at least 1")


def _counts(text: str) -> tuple[int, ...]:
    return tuple(_count(part) for part in text.split(","))


def _seed(text: str) -> int:
    return _whole(text, 0, "must not be negative")


def _whole(text: str, least: int, rule: str) -> int:
    # argparse would answer a ValueError with the name of a private function.
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r}") from None
    if value < least:
        raise argparse.ArgumentTypeError(f"{rule}, got {text}")
    return value


if __name__ == "__main__":
    sys.exit(main())
