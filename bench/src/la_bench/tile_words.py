"""Tiles in words, and those that a backend chooses for a call."""

from __future__ import annotations

import importlib
from collections.abc import Hashable
from dataclasses import asdict, is_dataclass
from typing import Any

from la_core import DecodeProblem


def show_tiles(tiles: Hashable) -> str:
    """Tiles as values with their names."""
    plain = plain_tiles(tiles)
    return " ".join(f"{name}={value}" for name, value in plain.items()) if isinstance(plain, dict) else str(plain)


def plain_tiles(tiles: Hashable) -> object:
    """Tiles as JSON can hold them."""
    return asdict(tiles) if is_dataclass(tiles) and not isinstance(tiles, type) else str(tiles)


def chosen_tiles(package: str, problem: DecodeProblem) -> str | None:
    """What `choose_decode_tiles` of a backend's package says; None for a package without one."""
    try:
        module: Any = importlib.import_module(f"{package}.decode_tiles")
    except ImportError:
        return None
    choose = getattr(module, "choose_decode_tiles", None)
    return None if choose is None else show_tiles(choose(problem))
