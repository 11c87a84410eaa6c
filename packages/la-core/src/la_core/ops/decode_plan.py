"""Everything about a decode call that its facts decide, computed once per set of facts; see `kept_plans`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from la_core.backends.choose_backend import CallDefaults
from la_core.backends.discover_backends import when_forgotten
from la_core.ops.decode_values import TENSORS, check_values
from la_core.ops.kept_plans import KeptPlan, PlanStore, Tensors
from la_core.spec.decode_checks import check_decode
from la_core.spec.decode_problem import DecodeProblem


class DecodePlan(KeptPlan[DecodeProblem]):
    """What one set of facts leads to.

    Attributes
    ----------
    default_scale
        `K ** -0.5`.
    checked_offsets
        The offsets that passed last: all layers of a model share them, so most calls compare instead of checking.
    direct
        What the backend offers for these facts, as a `DirectBackend`; None before the first call has run, and if it
        offers nothing.
    disjoint
        Arrangements in memory that were found free of overlap although ranges of addresses meet.
    offer
        What makes `direct`, until it has been asked.
    like_v
        True if `empty_like(v)` is contiguous without being told so, which is the faster call.
    """

    __slots__ = ("checked_offsets", "default_scale", "direct", "disjoint", "like_v", "offer")

    def __init__(
        self, problem: DecodeProblem, backend: object, method: str, asked: str, defaults: CallDefaults, tensors: Tensors
    ) -> None:
        super().__init__(problem, backend, method, asked, defaults, tensors)
        self.direct: Callable[..., bool] | None = None
        # Where values are read, every call has something to check.
        self.offer: Any = None if self.reads_values else getattr(backend, "direct_decode", None)
        self.default_scale = float(problem.K) ** -0.5
        self.disjoint: set[tuple[int, ...]] = set()
        self.checked_offsets: list[int] | None = None
        self.like_v = torch.empty_like(tensors[2]).is_contiguous()

    def take_offer(self) -> None:
        """Ask the backend once, behind the first call: what that had to prepare is there now."""
        offer, self.offer = self.offer, None
        if offer is None:  # another thread was first
            return
        extents = self.extents
        if len(extents) < len(TENSORS):
            out = self.problem.B * self.problem.H * self.problem.V * self.problem.out_dtype.itemsize
            extents = *extents, out
        try:
            self.direct = offer(self.problem, extents)
        except Exception as reason:
            # The call has run: it must not look as if it had not.
            warnings.warn(f"decode: direct_decode failed: {reason!r}", RuntimeWarning, stacklevel=3)


store = PlanStore("decode", "decode", DecodePlan)


class LatestPlans:
    """The plan of the last call with `out` and of the last one without: a decode loop finds its plan by one
    comparison.
    """

    __slots__ = ("allocating", "given")

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Drop both."""
        self.given: DecodePlan | None = None
        self.allocating: DecodePlan | None = None


latest = LatestPlans()
when_forgotten.append(latest.forget)


def find_plan(
    backend: object, tensors: tuple[Any, ...], softmax_scale: object, check_offsets: bool | None
) -> DecodePlan:
    """The plan for these arguments; see :meth:`PlanStore.find`.

    `softmax_scale` and `check_offsets` decide nothing here, but are checked with the rest if the facts are new.
    """

    def check() -> DecodeProblem:
        problem = check_decode(*tensors)
        check_values(problem, tensors, softmax_scale, check_offsets)
        return problem

    return store.find(backend, tensors, check)
