"""The fewest bytes that a step of one layer with a window can move, and how windows are filled in a long run.

`advance`, which all layers share, is left out: it moves a few bytes of a row.
"""

from __future__ import annotations

from la_bench.grid import SIZE, GridPoint
from la_core import WindowProblem
from la_core.spec.window_problem import WindowOp

ROUNDS = 2000
"""Of the power iteration: phases settle in a few dozen."""


def deferred_bytes(point: GridPoint, places: int) -> float:
    """Of a call of decode: lengths are uniform over 0 to N, and a full window writes its states."""
    return _problem("decode_window", point, places).bytes_moved(pending=places / 2, writing=1 / (places + 1))


def kept_bytes(point: GridPoint, places: int, drafts: int) -> float:
    """Of a verification, and of a commit of the rows that have no room for the next one."""
    length = steady_lengths(places, drafts)
    after = [(n + a, share / drafts) for n, share in enumerate(length) for a in range(1, drafts + 1)]
    folds = [(n, share) for n, share in after if n + drafts > places]
    fold = _problem("commit", point, places).bytes_moved(
        pending=sum(n * share for n, share in folds), writing=sum(share for _, share in folds)
    )
    return verify_bytes(point, places, drafts) + fold


def verify_bytes(point: GridPoint, places: int, drafts: int) -> float:
    """Of a verification alone."""
    pending = sum(n * share for n, share in enumerate(steady_lengths(places, drafts)))
    return _problem("verify", point, places, drafts).bytes_moved(pending=pending)


def once_bytes(point: GridPoint, drafts: int) -> float:
    """Of a verification on an empty window, and of a commit."""
    return _problem("verify", point, drafts, drafts).bytes_moved() + commit_bytes(point, drafts, drafts)


def commit_bytes(point: GridPoint, places: int, drafts: int) -> float:
    """Of a commit of 1 to T drafts, as of a fold of as many tokens."""
    return _problem("commit", point, places).bytes_moved(pending=(1 + drafts) / 2, writing=1)


def _problem(op: WindowOp, point: GridPoint, places: int, drafts: int = 1) -> WindowProblem:
    """A call of one layer."""
    return WindowProblem.contiguous(
        op,
        B=point.B,
        P=point.slots,
        N=places,
        H=point.H,
        K=SIZE,
        V=SIZE,
        T=drafts,
        io_dtype=point.io_dtype,
        state_dtype=point.state_dtype,
    )


def steady_lengths(places: int, drafts: int) -> list[float]:
    """Shares of the slots with 0, 1, ... N - T pending tokens at a verification, in a long run.

    Each step accepts 1 to T drafts with equal chance, and a slot without room for T more is emptied.
    """
    most = places - drafts
    share = [1 / (most + 1)] * (most + 1)
    for _ in range(ROUNDS):
        after = [0.0] * (most + 1)
        for n, part in enumerate(share):
            for accepted in range(1, drafts + 1):
                after[n + accepted if n + accepted <= most else 0] += part / drafts
        # The mean with what was before: with T = 1 the phases go round and never settle.
        share = [(one + other) / 2 for one, other in zip(share, after, strict=True)]
    return share
