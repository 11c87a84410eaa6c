"""The object behind the entry point `triton`."""

from __future__ import annotations

import os

import torch

from la_core.backends.capabilities import Capabilities
from la_core.spec.decode_problem import DecodeProblem
from la_core.spec.kv_window import KVWindow
from la_core.spec.window_problem import WindowProblem

INTERPRETED = os.environ.get("TRITON_INTERPRET", "") == "1"
"""Triton decides at import whether kernels are interpreted, so this must be set before Python starts."""

SIZES = range(1, 257)


class TritonBackend:
    """Runs CUDA tensors natively; CPU tensors, and only those, where Triton's interpreter is on."""

    name = "triton"
    spec_revision = 1
    capabilities = Capabilities(
        ops=("decode", "decode_window", "verify", "commit", "advance"),
        device_types=("cpu",) if INTERPRETED else ("cuda",),
        k_sizes=SIZES,
        v_sizes=SIZES,
        sizes_text="K and V up to 256",
        min_arch=(8, 0),
    )

    def refusal(self, problem: DecodeProblem | WindowProblem) -> str | None:
        """See :class:`la_core.backends.backend_contract.Backend`."""
        if problem.device.type == "cpu" and not INTERPRETED:
            return "runs CPU tensors only under Triton's interpreter: set TRITON_INTERPRET=1 before Python starts"
        if isinstance(problem, WindowProblem):
            return self.capabilities.window_refusal(problem)
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
        """Decode one token per row with a checked window; see :func:`la_core.decode`."""
        from la_triton import window_launch as launch

        call = launch.decode_window_call(q, k, v, s, s_offsets, decay_scales, window, softmax_scale, out)
        (launch.interpret_window if INTERPRETED else launch.launch_window)(problem, call)

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
        """Decode drafts without bringing them in; see :func:`la_core.verify`."""
        from la_triton import window_launch as launch

        call = launch.verify_call(q, k, v, s, s_offsets, decay_scales, window, draft_lengths, softmax_scale, out)
        (launch.interpret_window if INTERPRETED else launch.launch_window)(problem, call)

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
        """Bring tokens of one or all layers into the states; see :func:`la_core.commit` and :func:`la_core.fold`."""
        from la_triton import window_launch as launch

        call = launch.commit_call(problem, window, s, s_offsets, decay_scales, accepted, room)
        (launch.interpret_window if INTERPRETED else launch.launch_window)(problem, call)

    def advance(
        self,
        problem: WindowProblem,
        window: KVWindow,
        s_offsets: torch.Tensor,
        accepted: torch.Tensor | int,
        room: int | None,
        clear: bool,
    ) -> None:
        """Move the cursors; see :func:`la_core.advance` and :func:`la_core.clear`."""
        from la_triton import window_launch as launch

        call = launch.advance_call(problem, window, s_offsets, accepted, room, clear)
        (launch.interpret_window if INTERPRETED else launch.launch_window)(problem, call)


backend = TritonBackend()
