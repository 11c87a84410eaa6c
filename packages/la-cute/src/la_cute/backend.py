"""The object behind the entry point `cute`."""

from __future__ import annotations

import torch

from la_core.backends.capabilities import Capabilities
from la_core.spec.decode_problem import DecodeProblem
from la_core.spec.kv_window import KVWindow
from la_core.spec.window_problem import WindowProblem
from la_cute import prebuilt_kernels

SIZES = (64, 128, 256)


class CuteBackend:
    """Runs CUDA tensors."""

    name = "cute"
    spec_revision = 1
    capabilities = Capabilities(
        ops=("decode", "decode_window", "verify", "commit", "advance"),
        device_types=("cuda",),
        k_sizes=SIZES,
        v_sizes=SIZES,
        sizes_text="K and V of 64, 128 and 256",
        min_arch=(8, 0),
    )

    def refusal(self, problem: DecodeProblem | WindowProblem) -> str | None:
        """See :class:`la_core.backends.backend_contract.Backend`."""
        if isinstance(problem, WindowProblem):
            reason = self.capabilities.window_refusal(problem)
        else:
            reason = self.capabilities.decode_refusal(problem)
        return reason or prebuilt_kernels.refusal(problem)

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
        """See :class:`la_core.backends.backend_contract.WindowBackend`."""
        from la_cute.window_launch import window_launch

        if problem.P == 0:
            # No state, so every row is padding. The strides of an empty pool mean nothing.
            out.zero_()
            return
        window_launch(problem).decode(q, k, v, s, s_offsets, decay_scales, window, softmax_scale, out)

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
        """See :class:`la_core.backends.backend_contract.WindowBackend`."""
        from la_cute.window_launch import window_launch

        if problem.P == 0:
            out.zero_()
            return
        window_launch(problem).verify(q, k, v, s, s_offsets, decay_scales, window, draft_lengths, softmax_scale, out)

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
        """See :class:`la_core.backends.backend_contract.WindowBackend`."""
        from la_cute.window_launch import window_launch

        if problem.P > 0:
            window_launch(problem).commit(window, s, s_offsets, decay_scales, accepted, room)

    def advance(
        self,
        problem: WindowProblem,
        window: KVWindow,
        s_offsets: torch.Tensor,
        accepted: torch.Tensor | int,
        room: int | None,
        clear: bool,
    ) -> None:
        """See :class:`la_core.backends.backend_contract.WindowBackend`."""
        from la_cute.window_launch import cursors_launch

        if problem.P > 0:
            cursors_launch(problem)(window, s_offsets, accepted, room, clear)


backend = CuteBackend()
