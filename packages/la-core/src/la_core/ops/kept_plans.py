"""What a set of facts leads to, computed once per set and kept, for every operator.

A serving engine calls with the same shapes again and again. The first call with new facts runs every check, builds
the problem, chooses the backend, and keeps the result as a plan; a later call with the same facts pays for one
comparison and for what can differ all the same: memory addresses and values.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

from la_core.backends.choose_backend import CallDefaults, Problem, check_backend_name, choose_backend, current_defaults
from la_core.backends.discover_backends import when_forgotten
from la_core.ops.facts_guard import Guard, make_guard
from la_core.spec.state_pool_rules import byte_extent

MAX_PLANS = 4096
"""Plans kept by a store; beyond it all are dropped, so that ever new shapes cannot grow memory without bound."""

Tensors = tuple[torch.Tensor, ...]

ProblemT = TypeVar("ProblemT", bound=Problem)


class KeptPlan(Generic[ProblemT]):
    """What one set of facts leads to. Fields are read on the hot path, hence slots and no property.

    Attributes
    ----------
    problem
        The facts.
    run
        The operator of the backend that runs them, or None for an empty batch.
    asked, defaults
        The `backend` argument and the defaults of the context that led to this backend.
    reads_values
        True if values of tensors can be read without a synchronisation.
    extents
        Bytes from the first to the last element of each tensor, in the order of the arguments.
    """

    __slots__ = ("asked", "defaults", "extents", "guard", "key", "problem", "reads_values", "run")

    def __init__(
        self, problem: ProblemT, backend: object, method: str, asked: str, defaults: CallDefaults, tensors: Tensors
    ) -> None:
        self.asked = asked
        self.defaults = defaults
        self.problem: ProblemT = problem
        self.run: Callable[..., None] | None = getattr(backend, method) if problem.B > 0 else None
        self.reads_values = problem.device.type == "cpu"
        self.extents = tuple(byte_extent(t.shape, t.stride(), t.element_size()) for t in tensors)
        self.key = plan_key(asked, defaults, tensors)
        self.guard: Guard = self.new_guard(tensors)

    def new_guard(self, tensors: Tensors) -> Guard:
        """A guard for the dispatch state of this moment (inference mode changes it), or a comparison in Python: where
        torch offers no sound guard, and for a tensor given twice, which torch's guard never accepts.
        """
        guard = make_guard(tensors)
        return guard if guard is not None and guard(*tensors) else self._same_facts

    def _same_facts(self, *tensors: torch.Tensor) -> bool:
        return _may_be_known(tensors) and plan_key(self.asked, self.defaults, tensors) == self.key


PlanT = TypeVar("PlanT", bound=KeptPlan[Any])


class PlanStore(Generic[PlanT]):
    """The plans of one operator, found by the facts of a call's tensors.

    Parameters
    ----------
    op
        The operator as its caller spells it.
    method
        Its name among the methods of a backend.
    make
        The class of its plans.
    telling
        The tensor whose shape tells calls apart, by position: one with a row for each request.
    """

    def __init__(self, op: str, method: str, make: Callable[..., PlanT], telling: int = 0) -> None:
        self.op, self.method, self.make, self.telling = op, method, make, telling
        self.plans: dict[tuple[Any, ...], PlanT] = {}
        self.by_hint: dict[tuple[Any, ...], PlanT] = {}
        self._lock = threading.Lock()
        when_forgotten.append(self.forget)

    def find(self, backend: object, tensors: tuple[Any, ...], check: Callable[[], Any]) -> PlanT:
        """The plan for these arguments: a kept one, or a new one after all checks have passed.

        `check` judges all that can be wrong with a call, and returns its problem; it runs if the facts are new.

        Raises
        ------
        SpecViolation, UnsupportedByBackend, BackendUnavailable
            As :func:`la_core.decode`.
        """
        asked = check_backend_name(backend, self.op)
        defaults = current_defaults.get()
        # Engines step through a handful of batch sizes, so one shape nearly always names the plan; its guard decides.
        hint = (asked, defaults, len(tensors), getattr(tensors[self.telling], "shape", None))
        plan = self.by_hint.get(hint)
        if plan is not None and plan.guard(*tensors):
            return plan
        plan = None
        if _may_be_known(tensors):
            plan = self.plans.get(plan_key(asked, defaults, tensors))
        if plan is None:
            # All that can be wrong with the call is said before a backend is chosen: all give the same sentence.
            problem = dataclasses.replace(check(), overlap=defaults.overlap)
            chosen = choose_backend(problem, asked, self.op)
            plan = self.make(problem, chosen, self.method, asked, defaults, tensors)
            with self._lock:
                if len(self.plans) >= MAX_PLANS:
                    self.plans.clear()
                plan = self.plans.setdefault(plan.key, plan)
        elif not plan.guard(*tensors):
            plan.guard = plan.new_guard(tensors)
        with self._lock:
            if len(self.by_hint) >= MAX_PLANS:
                self.by_hint.clear()
            self.by_hint[hint] = plan
        return plan

    def forget(self) -> None:
        """Drop all plans, after the set of installed backends has changed."""
        with self._lock:
            self.plans.clear()
            self.by_hint.clear()


def plan_key(asked: str, defaults: CallDefaults, tensors: Tensors) -> tuple[Any, ...]:
    """Everything that a plan depends on, hashable."""
    return (
        asked,
        defaults,
        *[(type(t), t.shape, t.stride(), t.dtype, t.device, t.is_neg()) for t in tensors],
    )


def _may_be_known(tensors: tuple[Any, ...]) -> bool:
    """True if these are tensors that a plan can have been made for, so that their facts can be read."""
    if not all(isinstance(t, torch.Tensor) and t.layout is torch.strided for t in tensors):
        return False
    return not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))
