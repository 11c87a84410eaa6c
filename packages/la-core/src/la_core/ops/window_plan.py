"""Calls of the window operators: their arguments by name, and the plans of their facts; see `kept_plans`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from la_core.backends.choose_backend import CallDefaults, current_defaults
from la_core.ops.kept_plans import KeptPlan, PlanStore, Tensors
from la_core.spec.state_pool_rules import check_no_shared_memory, share_memory
from la_core.spec.window_problem import WindowOp, WindowProblem

MAX_ADDRESSES = 1024
"""Sets of addresses that are remembered as free of overlap, for each set of facts: layers and reused outputs repeat."""

WINDOW = ("window.k", "window.v", "window.start", "window.length")
"""Names of the tensors of a window, in the order in which they are passed around."""

_address_of = torch.Tensor.data_ptr
"""Of one tensor, without looking up its method: a call asks for ten and more."""


class WindowPlan(KeptPlan[WindowProblem]):
    """What one set of facts leads to.

    Attributes
    ----------
    apart
        Addresses of tensors that were found free of overlap.
    checked_offsets
        The offsets that passed last: all layers of a model share them.
    default_scale
        `K ** -0.5`.
    """

    __slots__ = ("apart", "checked_offsets", "default_scale")

    def __init__(
        self, problem: WindowProblem, backend: object, method: str, asked: str, defaults: CallDefaults, tensors: Tensors
    ) -> None:
        super().__init__(problem, backend, method, asked, defaults, tensors)
        self.apart: set[tuple[int, ...]] = set()
        self.checked_offsets: list[int] | None = None
        self.default_scale = float(max(problem.K, 1)) ** -0.5


class WindowCall(PlanStore[WindowPlan]):
    """One operator with one set of tensor arguments.

    Parameters
    ----------
    op
        The operator as its caller spells it.
    method
        Its name among the methods of a backend.
    names
        The tensor arguments, in the order in which they are passed around.
    written
        Those of them that are written.
    check
        Judges the facts of the tensors by name; see `window_checks`.
    """

    def __init__(
        self,
        op: str,
        method: WindowOp,
        names: tuple[str, ...],
        written: tuple[str, ...],
        check: Callable[[str, dict[str, Any]], WindowProblem],
    ) -> None:
        self.latest: WindowPlan | None = None
        super().__init__(op, method, WindowPlan, names.index("s_offsets"))
        self.names, self.written, self.check = names, written, check
        # What is written by position, each with the arguments that it must lie apart from; no pair occurs twice.
        self._apart = tuple(
            (names.index(first), tuple(names.index(name) for name in names if name not in written[: n + 1]))
            for n, first in enumerate(written)
        )

    def latest_plan(self, backend: str, tensors: Tensors) -> WindowPlan | None:
        """The plan of the last call if it is that of these arguments, whose memory has then been checked."""
        plan = self.latest
        if (
            plan is None
            or not plan.guard(*tensors)
            or plan.asked != backend
            or plan.defaults is not current_defaults.get()
        ):
            return None
        if tuple(map(_address_of, tensors)) not in plan.apart:
            self._check_addresses(plan, tensors)
        return plan

    def find_plan(self, backend: str, tensors: Tensors, check_values: Callable[[WindowProblem], object]) -> WindowPlan:
        """The plan for these arguments, whose memory has been checked, where :meth:`latest_plan` has none.

        `check_values` judges what facts do not show; it runs if the facts are new, so that all is said before a backend
        is chosen.
        """

        def check() -> WindowProblem:
            problem = self.check(self.op, dict(zip(self.names, tensors, strict=True)))
            if problem.device.type != "meta":
                self._check_memory(tensors)
            check_values(problem)
            return problem

        plan = self.latest = self.find(backend, tensors, check)
        self._check_addresses(plan, tensors)
        return plan

    def forget(self) -> None:
        """Drop all plans."""
        super().forget()
        self.latest = None

    def _check_addresses(self, plan: WindowPlan, tensors: Tensors) -> None:
        """Judge where the tensors lie, unless that was done before."""
        addresses = tuple(map(_address_of, tensors))
        if addresses in plan.apart:
            return
        if any(share_memory(tensors[i], tensors[j]) for i, j in self._meeting_ranges(addresses, plan.extents)):
            self._check_memory(tensors)
        if len(plan.apart) >= MAX_ADDRESSES:
            plan.apart.clear()
        plan.apart.add(addresses)

    def _meeting_ranges(self, addresses: tuple[int, ...], extents: tuple[int, ...]) -> list[tuple[int, int]]:
        """Positions of what is written and of another argument, for each two that may overlap."""
        meeting = []
        for written, others in self._apart:
            start, end = addresses[written], addresses[written] + extents[written]
            for other in others:
                if addresses[other] < end and start < addresses[other] + extents[other]:
                    meeting.append((written, other))
        return meeting

    def _check_memory(self, tensors: Tensors) -> None:
        check_no_shared_memory(self.op, dict(zip(self.names, tensors, strict=True)), self.written)
