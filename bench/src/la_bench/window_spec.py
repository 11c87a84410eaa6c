"""What `la-bench compare --op` can measure besides decode, and its options; imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from la_bench.errors import UsageError

DECODE = "decode"
OPS = (DECODE, "deferred", "verify", "commit")
WINDOW_OPS = OPS[1:]

GRIDS = {
    "deferred": "8,32,64x1,64,128,512",
    "verify": "64x16,32,64,128",
    "commit": "64x16,32,64,128",
}
QUICK_GRIDS = {"deferred": "8,64x1,64,256", "verify": "64x16,128", "commit": "64x16,128"}
CPU_GRID = "8x1,8"
"""On a CPU, where the gate is what counts and an interpreter takes seconds."""

PLACES = {"deferred": (7, 15), "verify": (16,), "commit": (16,)}
"""Of deferred decode, 7 is best with 16-bit states and with few states, 15 with many float32 ones on la-cute."""

DRAFTS = 4
LAYERS = {"verify": 1, "commit": 4}
MOST_PLACES = 64


@dataclass(frozen=True)
class WindowSpec:
    """What is measured at every point.

    Attributes
    ----------
    op
        One of `WINDOW_OPS`.
    places
        Sizes N of the windows; commit has one.
    drafts
        Draft tokens T of a row; 1 for deferred.
    layers
        Of verify: layers that share the launches of advance and clear. Of commit: layers of one `commit_layers`.
    """

    op: str
    places: tuple[int, ...]
    drafts: int = 1
    layers: int = 1

    def point_name(self, point: str) -> str:
        """The name of a point of the grid, complete, as in rows."""
        more = "" if self.op == "deferred" else f"/T{self.drafts}/L{self.layers}"
        return f"{self.op}/{point}{more}"

    @property
    def accepted(self) -> str | None:
        """How accepted drafts are drawn, in words."""
        return None if self.op == "deferred" else f"uniform over 1 to {self.drafts}"


def window_spec(op: str, places: Sequence[int], drafts: int | None, layers: int | None) -> WindowSpec | None:
    """From options, where those that are not given are empty or None; None for decode.

    Raises
    ------
    UsageError
        Options that do not belong together, or a window that is too small or too large.
    """
    if op == DECODE:
        if places or drafts or layers:
            raise UsageError("--window, --drafts and --layers belong to --op deferred, verify or commit. Pass it too.")
        return None
    places = tuple(dict.fromkeys(places)) or PLACES[op]
    if max(places) > MOST_PLACES:
        raise UsageError(f"--window takes from 1 to {MOST_PLACES} places, got {max(places)}.")
    if op == "deferred":
        if drafts or layers:
            raise UsageError("--drafts and --layers belong to --op verify and commit: deferred decode has no drafts.")
        return WindowSpec(op, places)
    drafts = drafts or DRAFTS
    if min(places) < drafts:
        raise UsageError(f"--window must hold the {drafts} drafts of --drafts, got {min(places)} places.")
    if op == "commit" and len(places) > 1:
        raise UsageError("--op commit takes one --window: what it costs does not depend on places that are not read.")
    return WindowSpec(op, places, drafts, layers or LAYERS[op])
