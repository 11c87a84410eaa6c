"""The object behind the entry point `triton`."""

from __future__ import annotations

import os

import torch

from la_core.backends.capabilities import Capabilities
from la_core.spec.decode_problem import DecodeProblem

INTERPRETED = os.environ.get("TRITON_INTERPRET", "") == "1"
"""Triton decides at import whether kernels are interpreted, so this must be set before Python starts."""

SIZES = range(1, 257)


class TritonBackend:
    """Runs CUDA tensors natively; CPU tensors, and only those, where Triton's interpreter is on."""

    name = "triton"
    spec_revision = 1
    capabilities = Capabilities(
        ops=("decode",),
        device_types=("cpu",) if INTERPRETED else ("cuda",),
        k_sizes=SIZES,
        v_sizes=SIZES,
        sizes_text="K and V up to 256",
        min_arch=(8, 0),
    )

    def refusal(self, problem: DecodeProblem) -> str | None:
        """See :class:`la_core.backends.backend_contract.Backend`."""
        if problem.device.type == "cpu" and not INTERPRETED:
            return "runs CPU tensors only under Triton's interpreter: set TRITON_INTERPRET=1 before Python starts"
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
        # Imported here, because importing a kernel imports the compiler.
        from la_triton import decode_launch

        run = decode_launch.interpret_decode if INTERPRETED else decode_launch.launch_decode
        run(problem, q, k, v, s, s_offsets, decay_scales, softmax_scale, out)


backend = TritonBackend()
