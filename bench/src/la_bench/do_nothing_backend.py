"""A backend that accepts every call and does nothing, to measure what surrounds a backend."""

from __future__ import annotations

import torch

from la_core import SPEC_REVISION, DecodeProblem, KVWindow, WindowProblem
from la_core.backends.capabilities import Capabilities


class DoNothingBackend:
    """Leaves `out` and the states as they are: wrong on purpose, and never installed outside of a measurement."""

    name = "do-nothing"
    spec_revision = SPEC_REVISION
    capabilities = Capabilities(
        ops=("decode", "decode_window", "verify", "commit", "advance"), device_types=("cpu", "cuda")
    )

    def refusal(self, problem: DecodeProblem | WindowProblem) -> str | None:
        """Refuses nothing."""
        return None

    def decode(
        self,
        problem: DecodeProblem,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        s: torch.Tensor,
        s_offsets: torch.Tensor,
        decay_scales: torch.Tensor,
        softmax_scale: float,
        out: torch.Tensor,
    ) -> None:
        """Return at once."""

    def decode_window(
        self,
        problem: WindowProblem,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        s: torch.Tensor,
        s_offsets: torch.Tensor,
        decay_scales: torch.Tensor,
        window: KVWindow,
        softmax_scale: float,
        out: torch.Tensor,
    ) -> None:
        """Return at once."""

    def verify(
        self,
        problem: WindowProblem,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        s: torch.Tensor,
        s_offsets: torch.Tensor,
        decay_scales: torch.Tensor,
        window: KVWindow,
        draft_lengths: torch.Tensor | None,
        softmax_scale: float,
        out: torch.Tensor,
    ) -> None:
        """Return at once."""

    def commit(
        self,
        problem: WindowProblem,
        window: KVWindow,
        s: torch.Tensor,
        s_offsets: torch.Tensor,
        decay_scales: torch.Tensor,
        accepted: torch.Tensor | int,
        room: int | None,
    ) -> None:
        """Return at once."""

    def advance(
        self,
        problem: WindowProblem,
        window: KVWindow,
        s_offsets: torch.Tensor,
        accepted: torch.Tensor | int,
        room: int | None,
        clear: bool,
    ) -> None:
        """Return at once."""


backend = DoNothingBackend()
