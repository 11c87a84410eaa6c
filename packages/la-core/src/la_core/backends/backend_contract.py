"""What an implementation must look like. A backend is one object behind one entry point."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from la_core.backends.capabilities import Capabilities
from la_core.spec.decode_problem import DecodeProblem


@runtime_checkable
class Backend(Protocol):
    """The object that an entry point of the group `la_core.backends` names.

    The entry point's name is the backend's name. Importing its module must touch no GPU and start no compiler.
    """

    @property
    def name(self) -> str:
        """The name users pass as `backend=`."""

    @property
    def spec_revision(self) -> int:
        """The :data:`la_core.SPEC_REVISION` the backend was written for."""

    @property
    def capabilities(self) -> Capabilities:
        """What it declares to run."""

    def refusal(self, problem: DecodeProblem) -> str | None:
        """Why this backend will not run a legal call, as a sentence without its own name; None if it will.

        Pure: no tensors, no GPU call, the same answer each time. An exception raised here is a bug and propagates.
        """

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
        """Run one checked call: write `out` and the states that `s_offsets` names.

        `la_core` has checked every argument and `problem` holds their facts: `B >= 1`, and `refusal(problem)` was
        None. The same `problem` object comes back for calls with the same facts, so it may key a cache by identity.
        Values of `s_offsets` are unchecked on a GPU: negative and `>= P` both mean padding.
        """
