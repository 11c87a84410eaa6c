"""A backend that accepts every call and does nothing, to measure what surrounds a backend."""

from __future__ import annotations

import torch

from la_core import SPEC_REVISION, DecodeProblem
from la_core.backends.capabilities import Capabilities


class DoNothingBackend:
    """Leaves `out` and the states as they are: wrong on purpose, and never installed outside of a measurement."""

    name = "do-nothing"
    spec_revision = SPEC_REVISION
    capabilities = Capabilities(ops=("decode",), device_types=("cpu", "cuda"))

    def refusal(self, problem: DecodeProblem) -> str | None:
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


backend = DoNothingBackend()
