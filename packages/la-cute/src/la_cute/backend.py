"""The object behind the entry point `cute`."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any

import torch

from la_core.backends.capabilities import Capabilities
from la_core.spec.decode_problem import DecodeProblem
from la_core.spec.kv_window import KVWindow
from la_core.spec.window_problem import WindowProblem
from la_cute import prebuilt_kernels

SIZES = (64, 128, 256)

MAX_LAUNCHES = 4096
"""Problems whose launches are kept; beyond it all are dropped."""


class EmptyPool:
    """The launch of a problem without a slot: every row is padding. Its strides mean nothing, and it has no kernel."""

    def __init__(self, problem: DecodeProblem | WindowProblem) -> None:
        self.problem = problem

    def decode(self, *arguments: Any) -> None:
        """Clear `out`, the last argument, with a window and without."""
        arguments[-1].zero_()

    def verify(self, *arguments: Any) -> None:
        """The same."""
        arguments[-1].zero_()

    def commit(self, *arguments: Any) -> None:
        """No state is there to bring anything into."""

    def advance(self, *arguments: Any) -> None:
        """No cursor is there."""

    def direct(self, extents: tuple[int, ...]) -> None:
        """There is no quicker way."""


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

    def __init__(self) -> None:
        self._launches: dict[int, Any] = {}
        self._lock = Lock()

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
        # Written out in every operator: a function more would take as long as a tenth of a launch.
        launch = self._launches.get(id(problem))
        if launch is None or launch.problem is not problem:
            launch = self._prepare(problem)
        launch.decode(q, k, v, s, s_offsets, decay_scales, softmax_scale, out)

    def direct_decode(self, problem: DecodeProblem, extents: tuple[int, ...]) -> Callable[..., bool] | None:
        """See :class:`la_core.backends.backend_contract.DirectBackend`."""
        launch = self._launches.get(id(problem))
        return launch.direct(extents) if launch is not None and launch.problem is problem else None

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
        launch = self._launches.get(id(problem))
        if launch is None or launch.problem is not problem:
            launch = self._prepare(problem)
        launch.decode(q, k, v, s, s_offsets, decay_scales, window, softmax_scale, out)

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
        launch = self._launches.get(id(problem))
        if launch is None or launch.problem is not problem:
            launch = self._prepare(problem)
        launch.verify(q, k, v, s, s_offsets, decay_scales, window, draft_lengths, softmax_scale, out)

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
        launch = self._launches.get(id(problem))
        if launch is None or launch.problem is not problem:
            launch = self._prepare(problem)
        launch.commit(window, s, s_offsets, decay_scales, accepted, room)

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
        launch = self._launches.get(id(problem))
        if launch is None or launch.problem is not problem:
            launch = self._prepare(problem)
        launch.advance(window, s_offsets, accepted, room, clear)

    def _prepare(self, problem: DecodeProblem | WindowProblem) -> Any:
        """Make the launch of a problem, which comes back as the same object with every call that has its facts."""
        launch: Any
        # Imported here, because a process that never calls an operator needs none of it.
        if problem.P == 0:
            launch = EmptyPool(problem)
        elif isinstance(problem, DecodeProblem):
            from la_cute.decode_launch import DecodeLaunch

            launch = DecodeLaunch(problem)
        else:
            from la_cute.window_launch import CursorsLaunch, WindowLaunch

            launch = CursorsLaunch(problem) if problem.op == "advance" else WindowLaunch(problem)
        with self._lock:
            if len(self._launches) >= MAX_LAUNCHES:
                self._launches.clear()
            self._launches[id(problem)] = launch
        return launch


backend = CuteBackend()
