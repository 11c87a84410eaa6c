"""The object behind the entry point `ref`."""

from __future__ import annotations

import torch

from la_core.backends.capabilities import Capabilities
from la_core.spec.decode_problem import DecodeProblem
from la_ref.decode import decode


class RefBackend:
    """Runs every legal call on CPU and CUDA tensors."""

    name = "ref"
    spec_revision = 1
    capabilities = Capabilities(ops=("decode",), device_types=("cpu", "cuda"))

    def refusal(self, problem: DecodeProblem) -> str | None:
        """See :class:`la_core.backends.backend_contract.Backend`."""
        return self.capabilities.decode_refusal(problem)

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
        """See :class:`la_core.backends.backend_contract.Backend`."""
        decode(problem, q, k, v, s, s_offsets, decay_scales, softmax_scale, out)


backend = RefBackend()
