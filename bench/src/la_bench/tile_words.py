"""Tiles in words, and those that a backend chooses for a call."""

from __future__ import annotations

import importlib
from collections.abc import Hashable
from dataclasses import asdict, is_dataclass
from typing import Any

from la_bench.report_text import count
from la_core import DecodeProblem, WindowProblem

SHAPE = ("block_v", "num_warps")


def show_tiles(tiles: Hashable) -> str:
    """Tiles as values with their names."""
    plain = plain_tiles(tiles)
    return " ".join(f"{name}={value}" for name, value in plain.items()) if isinstance(plain, dict) else str(plain)


def brief_tiles(tiles: Hashable, row_bytes: int) -> str:
    """Tiles in the words of a backend's own table: bytes of state, warps, and what else is set."""
    plain = plain_tiles(tiles)
    if not isinstance(plain, dict) or not {"block_v", "num_warps"} <= set(plain):
        return show_tiles(tiles)
    rest = (value if isinstance(value, str) else name for name, value in plain.items() if name not in SHAPE and value)
    return ", ".join((f"{plain['block_v'] * row_bytes / 1024:g} KiB", count(plain["num_warps"], "warp"), *rest))


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
