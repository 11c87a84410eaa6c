"""The program `la-bench`. Exit status: 0 done, 1 a result is wrong or over its limit, 2 a wrong option, 130 Ctrl-C."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from la_bench.errors import UsageError
from la_bench.version import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return the exit status."""
    options = _parser().parse_args(arguments)
    # torch, matplotlib and rich take seconds to import: after --help and mistyped options have been dealt with.
    from la_bench import commands

    try:
        return int(getattr(commands, options.command)(options))
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
        help="run all backends on named workloads and write a report",
        description="Run every available backend on named workloads, correctness first, and write report.md, "
        "report.html and rows.jsonl. Exit status 1 if a backend is wrong or raises, or if none has a result.",
    )
    compare.add_argument("--backends", type=_names, default=(), metavar="A,B", help="backends to run (default: all)")
    compare.add_argument(
        "--workloads", type=_names, default=(), metavar="W1,W2", help="names, or beginnings of names (default: all)"
    )
    compare.add_argument(
        "--quick", action="store_true", help="few samples, and without --workloads only light and medium loads"
    )
    compare.add_argument(
        "--out", type=Path, default=Path("report"), metavar="DIR", help="folder to write to (default: report)"
    )
    compare.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: cuda if there is one"
    )
    compare.add_argument("--seed", type=_seed, default=0, metavar="N", help="of traces and values (default: 0)")
    compare.add_argument("--list", action="store_true", help="list workloads and backends, and run nothing")

    host = commands.add_parser(
        "host",
        help="what la_core.decode costs from Python",
        description="Time la_core.decode around a backend that does nothing, with all checks on, against torch.add of "
        "a one-element CPU tensor in the same process.",
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


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text}")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def _seed(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must not be negative, got {text}")
    return value


if __name__ == "__main__":
    sys.exit(main())
