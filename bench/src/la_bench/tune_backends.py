"""Backends whose tiles can be tuned: what they offer, and how it is found in the packages of this project."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from la_bench.errors import UsageError
from la_bench.window_spec import DECODE
from la_core import DecodeProblem, WindowProblem

ALL = "all"
"""Stands for every backend that can be tuned."""

AnyProblem = DecodeProblem | WindowProblem

LAUNCHES = {"decode_window": DECODE}
"""Methods of a window's launch that are not called like the operator."""


class TunableBackend(Protocol):
    """What a backend must offer to be tuned, for decode or for the operators with a window."""

    def candidates(self, problem: AnyProblem) -> Sequence[Hashable]:
        """Tiles that are worth trying."""

    def chosen(self, problem: AnyProblem) -> Hashable:
        """The tiles that are used now."""

    def launch(self, problem: AnyProblem, tiles: Hashable) -> Callable[..., None]:
        """A launch with the arguments of the backend's method for that operator, without the problem."""


class PackageBackend:
    """A backend of this project, by the names that its package gives to tiles and launches.

    Parameters
    ----------
    name
        Of the backend.
    windows
        Whether the operators with a window are tuned, and not decode.
    """

    def __init__(self, name: str, *, windows: bool = False) -> None:
        kind = "window" if windows else "decode"
        candidates = "candidate_window_tiles" if windows else "candidate_tiles"
        try:
            tiles: Any = importlib.import_module(f"la_{name}.{kind}_tiles")
            launch: Any = importlib.import_module(f"la_{name}.{kind}_launch")
        except ImportError as reason:
            raise UsageError(f"--backend {name} cannot be tuned: {reason}.") from reason
        if not hasattr(tiles, candidates):
            raise UsageError(f"--backend {name} cannot be tuned: la_{name}.{kind}_tiles has no {candidates}.")
        self._candidates: Any = getattr(tiles, candidates)
        self._choose: Any = getattr(tiles, f"choose_{kind}_tiles")
        self._launch: Any = launch.WindowLaunch if windows else launch.DecodeLaunch

    def candidates(self, problem: AnyProblem) -> Sequence[Hashable]:
        """See :class:`TunableBackend`."""
        return tuple(self._candidates(problem))

    def chosen(self, problem: AnyProblem) -> Hashable:
        """See :class:`TunableBackend`."""
        tiles: Hashable = self._choose(problem)
        return tiles

    def launch(self, problem: AnyProblem, tiles: Hashable) -> Callable[..., None]:
        """See :class:`TunableBackend`."""
        op = problem.op if isinstance(problem, WindowProblem) else DECODE
        launch: Callable[..., None] = getattr(self._launch(problem, tiles), LAUNCHES.get(op, op))
        return launch


def tunable_backends(
    names: Sequence[str], installed: Iterable[str], *, windows: bool = False
) -> dict[str, PackageBackend]:
    """The named backends; for `all`, every installed one that has tiles to choose from.

    Raises
    ------
    UsageError
        A named one cannot be tuned, or none can.
    """
    if tuple(names) != (ALL,):
        return {name: PackageBackend(name, windows=windows) for name in names}
    found = {}
    for name in installed:
        with suppress(UsageError):
            found[name] = PackageBackend(name, windows=windows)
    if not found:
        raise UsageError("--backend all: no installed backend has tiles to choose from.")
    return found
