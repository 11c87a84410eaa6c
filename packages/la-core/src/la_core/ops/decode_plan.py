"""Everything about a decode call that its facts decide, computed once per set of facts.

A serving engine calls with the same shapes again and again. The first call with new facts runs every check, builds
the `DecodeProblem`, chooses the backend, and keeps the result as a `DecodePlan`; a later call with the same facts
pays for one comparison and for what can differ all the same: memory addresses, offset values and the scale.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import torch

from la_core.backends.choose_backend import CallDefaults, check_backend_name, choose_backend, current_defaults
from la_core.backends.discover_backends import when_forgotten
from la_core.ops.decode_values import check_values
from la_core.ops.facts_guard import Guard, make_guard
from la_core.spec.decode_checks import check_decode
from la_core.spec.decode_problem import DecodeProblem
from la_core.spec.state_pool_rules import byte_extent

MAX_PLANS = 4096
"""Plans kept; beyond it all are dropped, so that ever new shapes cannot grow memory without bound."""

_lock = threading.Lock()
_plans: dict[tuple[Any, ...], DecodePlan] = {}
_by_hint: dict[tuple[Any, ...], DecodePlan] = {}


class DecodePlan:
    """What one set of facts leads to. Fields are read on the hot path, hence slots and no property.

    Attributes
    ----------
    problem
        The facts.
    run
        `decode` of the backend that runs them, or None for an empty batch.
    asked, defaults
        The `backend` argument and the defaults of the context that led to this backend.
    default_scale
        `K ** -0.5`.
    reads_offsets
        True if offset values can be read without a synchronisation.
    checked_offsets
        The offsets that passed last: all layers of a model share them, so most calls compare instead of checking.
    disjoint
        Arrangements in memory that were found free of overlap although ranges of addresses meet.
    like_v
        True if `empty_like(v)` is contiguous without being told so, which is the faster call.
    extents
        Bytes from the first to the last element of each tensor, in the order of the arguments, `out` last.
    """

    __slots__ = (
        "asked",
        "checked_offsets",
        "default_scale",
        "defaults",
        "disjoint",
        "extents",
        "guard",
        "key",
        "like_v",
        "problem",
        "reads_offsets",
        "run",
    )

    def __init__(
        self, problem: DecodeProblem, asked: str, defaults: CallDefaults, tensors: tuple[torch.Tensor, ...]
    ) -> None:
        backend = choose_backend(problem, asked)
        self.asked = asked
        self.defaults = defaults
        self.problem: DecodeProblem = problem
        self.run: Callable[..., None] | None = backend.decode if problem.B > 0 else None
        self.default_scale = float(problem.K) ** -0.5
        self.reads_offsets = problem.device.type == "cpu"
        self.disjoint: set[tuple[int, ...]] = set()
        self.checked_offsets: list[int] | None = None
        self.like_v = torch.empty_like(tensors[2]).is_contiguous()
        self.extents = tuple(byte_extent(t.shape, t.stride(), t.element_size()) for t in tensors)
        self.key = plan_key(asked, defaults, tensors)
        self.guard: Guard = self.new_guard(tensors)

    def new_guard(self, tensors: tuple[torch.Tensor, ...]) -> Guard:
        """A guard for the dispatch state of this moment (inference mode changes it), or a comparison in Python: where
        torch offers no sound guard, and for a tensor given twice, which torch's guard never accepts.
        """
        guard = make_guard(tensors)
        return guard if guard is not None and guard(*tensors) else self._same_facts

    def _same_facts(self, *tensors: torch.Tensor) -> bool:
        return _may_be_known(tensors) and plan_key(self.asked, self.defaults, tensors) == self.key


class LatestPlans:
    """The plan of the last call with `out` and of the last one without: a decode loop finds its plan by one
    comparison.
    """

    __slots__ = ("allocating", "given")

    def __init__(self) -> None:
        self.given: DecodePlan | None = None
        self.allocating: DecodePlan | None = None


latest = LatestPlans()


def find_plan(
    backend: object, tensors: tuple[Any, ...], softmax_scale: object, check_offsets: bool | None
) -> DecodePlan:
    """The plan for these arguments: a kept one, or a new one after all checks have passed.

    `softmax_scale` and `check_offsets` decide nothing here, but are checked with the rest if the facts are new.

    Raises
    ------
    SpecViolation, UnsupportedByBackend, BackendUnavailable
        As :func:`la_core.decode`.
    """
    asked = check_backend_name(backend)
    defaults = current_defaults.get()
    # Engines step through a handful of batch sizes, so q's shape alone nearly always names the plan; its guard decides.
    hint = (asked, defaults, len(tensors), getattr(tensors[0], "shape", None))
    plan = _by_hint.get(hint)
    if plan is not None and plan.guard(*tensors):
        return plan
    plan = None
    if _may_be_known(tensors):
        plan = _plans.get(plan_key(asked, defaults, tensors))
    if plan is None:
        # All that can be wrong with the call is said before a backend is chosen, so that all give the same sentence.
        problem = dataclasses.replace(check_decode(*tensors), overlap=defaults.overlap)
        check_values(problem, tensors, softmax_scale, check_offsets)
        plan = DecodePlan(problem, asked, defaults, tensors)
        with _lock:
            if len(_plans) >= MAX_PLANS:
                _plans.clear()
            plan = _plans.setdefault(plan.key, plan)
    elif not plan.guard(*tensors):
        plan.guard = plan.new_guard(tensors)
    with _lock:
        if len(_by_hint) >= MAX_PLANS:
            _by_hint.clear()
        _by_hint[hint] = plan
    return plan


def forget_plans() -> None:
    """Drop all plans, after the set of installed backends has changed."""
    with _lock:
        _plans.clear()
        _by_hint.clear()
        latest.given = latest.allocating = None


when_forgotten.append(forget_plans)


def plan_key(asked: str, defaults: CallDefaults, tensors: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
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
