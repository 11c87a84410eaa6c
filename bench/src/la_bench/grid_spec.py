"""How a grid is written on a command line; imports no torch."""

from __future__ import annotations

DEFAULT_GRID = "8,16,32,64x1,2,4,8,16,32,64,128,256,512"
QUICK_GRID = "8,64x1,8,64,256"
CPU_GRID, CPU_QUICK_GRID = "8,64x1,4,16", "8x1,8"
"""On a CPU, whose largest pool holds 1024 states, and where an interpreter takes seconds."""

DTYPE_NAMES = ("float32", "bfloat16", "float16")


def default_grid(device_type: str, *, quick: bool) -> str:
    """The grid of decode where none is given."""
    full, small = (CPU_GRID, CPU_QUICK_GRID) if device_type == "cpu" else (DEFAULT_GRID, QUICK_GRID)
    return small if quick else full


def parse_grid(text: str) -> tuple[tuple[int, int], ...]:
    """Pairs (H, B) of `H,H..xB,B..`, such as `8,16x1,64`; H counts slowest.

    Raises
    ------
    ValueError
        It is not two lists of positive numbers with an x between them.
    """
    parts = [[int(number) for number in part.split(",")] for part in text.lower().split("x")]
    if len(parts) != 2 or min(n for part in parts for n in part) < 1:
        raise ValueError(f"not heads x rows: {text!r}")
    heads, rows = (list(dict.fromkeys(part)) for part in parts)
    return tuple((H, B) for H in heads for B in rows)
