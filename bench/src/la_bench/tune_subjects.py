"""What tiles are tuned on: calls of decode at a point of a grid, or of one operator with a window there."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Protocol

import torch

from la_bench.accuracy import Verdict
from la_bench.comparison import SubjectCalls
from la_bench.grid import GridPoint
from la_bench.rows import BackendFacts
from la_bench.run_grid import GridSubject, GridTensors
from la_bench.run_window import WindowSubject
from la_bench.tensors import DecodeCall
from la_bench.timing import Bound
from la_bench.tune_backends import AnyProblem, TunableBackend
from la_bench.variants import Variant
from la_bench.window_calls import WindowCall, WindowTensors
from la_bench.window_spec import WindowSpec
from la_bench.window_variants import Commits, Deferred, Verifies, Way, WayVariant
from la_core.conformance.window_inputs import WindowInputs
from la_core.conformance.window_target import problem_of


class TuneSubject(Protocol):
    """One point, whose calls all are the same problem."""

    point: GridPoint

    def start_judging(self) -> None:
        """See :class:`la_bench.comparison.Subject`."""

    def judge(self, variant: Variant) -> Verdict:
        """See :class:`la_bench.comparison.Subject`."""

    def calls(self) -> SubjectCalls:
        """See :class:`la_bench.comparison.Subject`."""

    def facts_of_calls(self) -> AnyProblem:
        """The problem of the calls on the device, from their tensors; known while judging."""

    def variant(self, backend: TunableBackend, problem: AnyProblem, tiles: Hashable) -> Variant:
        """The backend with given tiles."""


class DecodePoint(GridSubject):
    """Calls of decode."""

    def facts_of_calls(self) -> AnyProblem:
        """See :class:`TuneSubject`."""
        return self.first_problem()

    def variant(self, backend: TunableBackend, problem: AnyProblem, tiles: Hashable) -> Variant:
        """See :class:`TuneSubject`."""
        return DecodeTilesVariant(backend, problem, tiles)


class WindowPoint(WindowSubject):
    """Calls of one operator with a window, at random phases of the windows."""

    def __init__(self, point: GridPoint, tensors: WindowTensors, spec: WindowSpec) -> None:
        super().__init__(point, tensors, spec)
        self.way = tuned_way(spec)

    def facts_of_calls(self) -> AnyProblem:
        """See :class:`TuneSubject`."""
        (action,) = self.way.actions(self._judged())
        return problem_of(action)

    def variant(self, backend: TunableBackend, problem: AnyProblem, tiles: Hashable) -> Variant:
        """See :class:`TuneSubject`."""
        return WindowTilesVariant(backend, problem, tiles, self.way)


class DecodeTilesVariant(Variant):
    """decode on a backend with given tiles."""

    def __init__(self, backend: TunableBackend, problem: AnyProblem, tiles: Hashable) -> None:
        self.facts = BackendFacts(str(tiles), None, None, overlap=problem.overlap)
        self._launch = backend.launch(problem, tiles)

    def bind(self, call: DecodeCall) -> Bound:
        """See :class:`Variant`."""
        tensors = (call.q, call.k, call.v, call.s, call.s_offsets, call.decay_scales)
        return partial(self._launch, *tensors, call.softmax_scale, call.out)

    def run(self, call: DecodeCall) -> torch.Tensor:
        """See :class:`Variant`."""
        self.bind(call)()
        return call.out


class WindowTilesVariant(WayVariant):
    """An operator with a window on a backend with given tiles."""

    def __init__(self, backend: TunableBackend, problem: AnyProblem, tiles: Hashable, way: Way) -> None:
        self.facts = BackendFacts(str(tiles), None, None, overlap=problem.overlap)
        self.way = way
        self._launch = backend.launch(problem, tiles)

    def bind(self, call: DecodeCall) -> Bound:
        """See :class:`Variant`."""
        assert isinstance(call, WindowCall)
        (action,) = self.way.actions(call)
        return bind_launch(self._launch, action)

    def run_action(self, action: WindowInputs) -> torch.Tensor | None:
        """See :class:`WayVariant`."""
        bind_launch(self._launch, action)()
        return action.out


def tuned_way(spec: WindowSpec) -> Way:
    """The one operator of a step that is tuned."""
    if spec.op == "deferred":
        return Deferred(spec.places[0])
    return Verifies(spec) if spec.op == "verify" else Commits("commit", spec)


def bind_launch(launch: Callable[..., None], action: WindowInputs) -> Bound:
    """The launch of a call, as a backend gets its arguments from la_core."""
    case, window = action.case, action.window
    if case.op == "commit":
        return partial(launch, window, action.s, action.s_offsets, action.decay_scales, action.counts, case.room)
    drafts = (None,) if case.op == "verify" else ()
    tokens = (action.q, action.k, action.v, action.s, action.s_offsets, action.decay_scales, window)
    return partial(launch, *tokens, *drafts, case.K**-0.5, action.out)


def tune_subjects(
    points: Sequence[GridPoint], spec: WindowSpec | None, device: torch.device, seed: int
) -> list[TuneSubject]:
    """A subject for each point, all on the same memory; of decode without a spec."""
    if spec is None:
        tensors = GridTensors(points, device, seed)
        return [DecodePoint(point, tensors) for point in points]
    of_windows = WindowTensors(points, spec, device, seed)
    return [WindowPoint(point, of_windows, spec) for point in points]
