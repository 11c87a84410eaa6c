"""The object behind the entry point `cute`."""

from __future__ import annotations

import torch

from la_core.backends.capabilities import Capabilities
from la_core.spec.decode_problem import DecodeProblem
from la_cute import prebuilt_kernels

SIZES = (64, 128, 256)


class CuteBackend:
    """Runs CUDA tensors."""

    name = "cute"
    spec_revision = 1
    capabilities = Capabilities(
        ops=("decode",),
        device_types=("cuda",),
        k_sizes=SIZES,
        v_sizes=SIZES,
        sizes_text="K and V of 64, 128 and 256",
        min_arch=(8, 0),
    )

    def refusal(self, problem: DecodeProblem) -> str | None:
        """See :class:`la_core.backends.backend_contract.Backend`."""
        return self.capabilities.decode_refusal(problem) or prebuilt_kernels.refusal(problem)

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
        # Imported here, because a process that never calls decode needs none of it.
        from la_cute.decode_launch import launch_decode

        launch_decode(problem, q, k, v, s, s_offsets, decay_scales, softmax_scale, out)


backend = CuteBackend()
