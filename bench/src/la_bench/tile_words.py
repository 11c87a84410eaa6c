"""Tiles in words, and those that a backend chooses for a call."""

from __future__ import annotations

import importlib
import math
from collections.abc import Hashable
from dataclasses import asdict, is_dataclass
from typing import Any

from la_bench.report_text import count
from la_core import DecodeProblem, WindowProblem

BLOCK = ("block_v", "tiles_of_block")
"""Rows of V in a block, and how often it has as many."""


def show_tiles(tiles: Hashable) -> str:
    """Tiles as values with their names."""
    plain = plain_tiles(tiles)
    return " ".join(f"{name}={value}" for name, value in plain.items()) if isinstance(plain, dict) else str(plain)


def brief_tiles(tiles: Hashable, row_bytes: int) -> str:
    """Tiles in the words of a backend's own table: bytes of state, warps, and what else is set."""
    shape, plain = block_and_warps(tiles, row_bytes), plain_tiles(tiles)
    if shape is None or not isinstance(plain, dict):
        return show_tiles(tiles)
    others = {name: value for name, value in plain.items() if name not in (*BLOCK, "num_warps") and value}
    return ", ".join((f"{shape[0]:g} KiB", count(shape[1], "warp"), *map(_brief, others, others.values())))


def block_and_warps(tiles: Hashable, row_bytes: int) -> tuple[float, int] | None:
    """KiB of states in a block and its warps; None for tiles that do not say."""
    plain = plain_tiles(tiles)
    if not isinstance(plain, dict) or not {"block_v", "num_warps"} <= set(plain):
        return None
    rows = math.prod(plain.get(name, 1) for name in BLOCK)
    return rows * row_bytes / 1024, plain["num_warps"]


def _brief(name: str, value: object) -> str:
    """A word as it is, what is on by its name, a number with its name."""
    if isinstance(value, str):
        return value
    return name if value is True else f"{name} {value}"


def plain_tiles(tiles: Hashable) -> object:
    """Tiles as JSON can hold them."""
    return asdict(tiles) if is_dataclass(tiles) and not isinstance(tiles, type) else str(tiles)


def chosen_tiles(package: str, problem: DecodeProblem | WindowProblem) -> str | None:
    """What `choose_decode_tiles` of a backend's package says, or `choose_window_tiles` of a problem with a window; None
    for a package without one.
    """
    kind = "window" if isinstance(problem, WindowProblem) else "decode"
    try:
        module: Any = importlib.import_module(f"{package}.{kind}_tiles")
    except ImportError:
        return None
    choose = getattr(module, f"choose_{kind}_tiles", None)
    return None if choose is None else show_tiles(choose(problem))
