"""The fewest bytes that a step with a window can move, and how windows are filled in a long run."""

from __future__ import annotations

from dataclasses import dataclass

from la_bench.grid import SIZE, GridPoint

ROUNDS = 2000
"""Of the power iteration: phases settle in a few dozen."""


@dataclass(frozen=True)
class Traffic:
    """What a row moves in a step, on average.

    Attributes
    ----------
    states
        Times that its states are read or written.
    kept
        Tokens whose k and v are read from its window or written to it.
    tokens
        Tokens whose q, k and v are read, and whose outputs are written.
    """

    states: float
    kept: float = 0.0
    tokens: float = 0.0

    def bytes_at(self, point: GridPoint) -> float:
        """Of all rows of a point; slopes, offsets and cursors are less than a thousandth and not counted."""
        vector = point.B * point.H * SIZE * point.io_dtype.itemsize
        return self.states * point.state_bytes + 2 * self.kept * vector + 4 * self.tokens * vector


def deferred_traffic(places: int) -> Traffic:
    """Lengths are uniform over 0 to N: N / 2 tokens are read, and a new one is kept unless the window is full."""
    return Traffic(1 + 1 / (places + 1), places / 2 + places / (places + 1), 1)


def kept_traffic(places: int, drafts: int) -> Traffic:
    """Verifying reads states and pending tokens, and writes drafts; folding reads tokens and moves states twice."""
    length = steady_lengths(places, drafts)
    pending = sum(n * share for n, share in enumerate(length))
    full = [(n + a, share / drafts) for n, share in enumerate(length) for a in range(1, drafts + 1)]
    folds = [(n, share) for n, share in full if n + drafts > places]
    states = 1 + 2 * sum(share for _, share in folds)
    return Traffic(states, pending + drafts + sum(n * share for n, share in folds), drafts)


def once_traffic(drafts: int) -> Traffic:
    """A verification reads states and writes drafts; a commit reads accepted ones, and reads and writes states."""
    return Traffic(3, drafts + (1 + drafts) / 2, drafts)


def commit_traffic(drafts: int) -> Traffic:
    """The accepted drafts, and the states there and back."""
    return Traffic(2, (1 + drafts) / 2)


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
