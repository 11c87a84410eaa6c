"""The object behind the entry point `ref`."""

from __future__ import annotations

import torch

from la_core.backends.capabilities import Capabilities
from la_core.spec.decode_problem import DecodeProblem
from la_core.spec.kv_window import KVWindow
from la_core.spec.window_problem import WindowProblem
from la_ref.advance import advance
from la_ref.commit import commit
from la_ref.decode import decode
from la_ref.verify import verify
from la_ref.window_decode import decode_window


class RefBackend:
    """Runs every legal call on CPU and CUDA tensors."""

    name = "ref"
    spec_revision = 1
    capabilities = Capabilities(
        ops=("decode", "decode_window", "verify", "commit", "advance"), device_types=("cpu", "cuda")
    )

    def refusal(self, problem: DecodeProblem | WindowProblem) -> str | None:
        """See :class:`la_core.backends.backend_contract.Backend`."""
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
        decode(problem, q, k, v, s, s_offsets, decay_scales, softmax_scale, out)

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
        decode_window(problem, q, k, v, s, s_offsets, decay_scales, window, softmax_scale, out)

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
        verify(problem, q, k, v, s, s_offsets, decay_scales, window, draft_lengths, softmax_scale, out)

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
        commit(problem, window, s, s_offsets, decay_scales, accepted, room)

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
        advance(problem, window, s_offsets, accepted, room, clear)


backend = RefBackend()
