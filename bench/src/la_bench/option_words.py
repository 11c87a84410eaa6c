"""The options of a command line in words, for rows that are kept; paths are for their commands to shorten."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from la_bench.window_spec import DECODE

LEFT_OPEN = (DECODE, "auto")
"""Values of options that nobody needs to give."""


def option_words(options: Namespace, *names: str) -> list[str]:
    """The options of these names as they would be written, without those that were not given."""
    words = []
    for name in names:
        value = getattr(options, name.replace("-", "_"))
        if value is True:
            words.append(f"--{name}")
        elif value and value not in LEFT_OPEN:
            words += [f"--{name}", ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]
    return words


def pair_words(name: str, pairs: Sequence[tuple[int, int]]) -> list[str]:
    """An option that takes all pairs of two lists of numbers; see :func:`la_bench.grid_spec.parse_grid`."""
    lists = (",".join(dict.fromkeys(str(pair[n]) for pair in pairs)) for n in (0, 1))
    return [f"--{name}", "x".join(lists)] if pairs else []
