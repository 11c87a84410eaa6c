"""Variants x points with a window -> rows; see `run_grid`, whose machinery this uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from la_bench.accuracy import Verdict
from la_bench.comparison import Say, SubjectCalls
from la_bench.environment import Environment
from la_bench.errors import UsageError
from la_bench.grid import SIZE, GridPoint, estimate_seconds
from la_bench.rows import Row, WorkloadFacts
from la_bench.run_compare import Keep, compare_subjects
from la_bench.run_grid import GridSubject
from la_bench.timing import Effort, Tick
from la_bench.variants import Variant
from la_bench.window_calls import WindowCall, WindowTensors
from la_bench.window_gate import JudgedAction, judge_actions, judged_action
from la_bench.window_spec import WindowSpec
from la_bench.window_variants import DecodesVariant, Way, WayVariant, rivals_of
from la_core import WindowProblem
from la_core.conformance.window_inputs import WindowInputs
from la_core.spec.decode_problem import compute_capability
from la_core.spec.window_problem import WindowOp

WALK = 4
"""Most calls in a sample on a CPU."""

HOST_BYTES, HOST_LAYERS = 64 << 20, 4
"""Host time is taken of calls with at most so many bytes of states, and so many layers."""

BACKEND_OPS: dict[str, WindowOp] = {"deferred": "decode_window", "verify": "verify", "commit": "commit"}
"""What a backend calls them."""

TRUTH_S = 0.5
"""Of each size of window at each point: float64, in Python loops."""

LAUNCHES = {"deferred": 1.0, "verify": 4.0, "commit": 1.0}
"""Of a call of a lap."""


class WindowSubject(GridSubject):
    """One point: judged on the very tensors that are timed."""

    def __init__(self, point: GridPoint, tensors: WindowTensors, spec: WindowSpec) -> None:
        super().__init__(point, tensors)
        self.spec, self._of_windows = spec, tensors
        self.name = spec.point_name(point.name)
        self._floor = self._floor_subject()
        self._truth_of: dict[tuple[str, int, int], JudgedAction] = {}

    @property
    def asked(self) -> WindowProblem:
        """See :class:`la_bench.comparison.Subject`."""
        point, spec = self.point, self.spec
        return WindowProblem.contiguous(
            BACKEND_OPS[spec.op],
            B=point.B,
            P=self.problem.P,
            N=spec.places[0],
            H=point.H,
            K=SIZE,
            V=SIZE,
            T=spec.drafts,
            L=spec.layers,
            io_dtype=point.io_dtype,
            state_dtype=point.state_dtype,
            counts_dtype=torch.int32 if spec.op == "commit" else None,
            state_layout=point.layout,
            device=self.problem.device,
            arch=compute_capability(self.problem.device),
        )

    def start_judging(self) -> None:
        """See :class:`la_bench.comparison.Subject`."""
        super().start_judging()
        if self._floor is not None:
            self._floor.start_judging()

    def judge(self, variant: Variant) -> Verdict:
        """Judge each call of an operator, in order; decode, floors and peers as at a point of a grid."""
        if not isinstance(variant, WayVariant):
            if variant.facts.kind == "floor" and self._floor is not None:
                return self._floor.judge(variant)
            return super().judge(variant)
        way = variant.way
        verdicts = [self._judge_way(variant, phase) for phase in self._phases(way)]
        faults = dict.fromkeys(fault for verdict in verdicts for fault in verdict.faults)
        outs = [verdict.out_error for verdict in verdicts if verdict.out_error is not None]
        return Verdict(tuple(faults), max(outs, default=None), max(verdict.state_error for verdict in verdicts))

    def calls(self) -> SubjectCalls:
        """See :class:`la_bench.comparison.Subject`."""
        calls = super().calls()
        self._truth_of = {}
        if self._floor is not None:
            self._floor.calls()
        walk = next(n for n in range(min(WALK, len(calls.lap)), 0, -1) if len(calls.lap) % n == 0)
        # Launches must not wait for a full queue.
        hosted = self.point.state_bytes <= HOST_BYTES and self.spec.layers <= HOST_LAYERS
        return replace(calls, stride=walk, smallest=range(len(calls.lap)) if hosted else ())

    def bytes_of(self, variant: Variant) -> float:
        """See :class:`la_bench.comparison.Subject`."""
        if isinstance(variant, WayVariant):
            return variant.way.bytes_at(self.point)
        if variant.facts.kind == "floor" and self._floor is not None:
            return self._floor.bytes_per_call
        return self.bytes_per_call * (self.spec.drafts if isinstance(variant, DecodesVariant) else 1)

    def rivals(self, variant: Variant) -> dict[str, str]:
        """See :class:`la_bench.comparison.Subject`."""
        return rivals_of(variant, self.spec)

    def facts(self) -> WorkloadFacts:
        """See :class:`la_bench.comparison.Subject`."""
        spec, facts = self.spec, super().facts()
        words = {
            "deferred": "one token of each row, cursors at random phases",
            "verify": f"a step of {spec.drafts} drafts of each row, of one layer",
            "commit": f"the accepted of {spec.drafts} drafts brought into the states, of one layer",
        }
        held, groups = self._of_windows.held(self.point)
        return replace(
            facts,
            description=f"{facts.description}: {words[spec.op]}",
            pool_slots=groups * self.point.B,
            reuse_bytes=(held * groups - 1) * self.point.state_bytes,
            op=spec.op,
            drafts=None if spec.op == "deferred" else spec.drafts,
            layers=None if spec.op == "deferred" else spec.layers,
            accepted=spec.accepted,
            floor_dtype="float32" if spec.op == "deferred" else None,
        )

    def _judged(self) -> WindowCall:
        call = self._lap[-1]
        assert isinstance(call, WindowCall)
        return call

    def _phases(self, way: Way) -> tuple[int, ...]:
        """The fullest window for the first row, one less for each row behind; another one if there is but one row."""
        return (0,) if self.point.B > 1 or not way.phased else (0, way.longest // 2 + 1)

    def _judge_way(self, variant: WayVariant, phase: int) -> Verdict:
        """Judge all calls of a step, with windows of all lengths where these matter."""
        way, call = variant.way, self._judged()
        length = call.windows[way.window].length
        before = length.clone()
        if way.phased:
            rows = torch.arange(self.point.B, device=length.device)
            length[call.s_offsets.long()] = ((way.longest - phase - rows) % (way.longest + 1)).int()
        try:
            count = len(way.actions(call, in_place=True))
            return judge_actions([self._maker(way, phase, n) for n in range(count)], variant.run_action)
        finally:
            length.copy_(before)

    def _maker(self, way: Way, phase: int, number: int) -> Callable[[], JudgedAction]:
        """The truth of a step's call is computed when its turn comes, and is the same for every backend."""
        key = way.label, phase, number

        def make() -> JudgedAction:
            if key not in self._truth_of:
                action: WindowInputs = way.actions(self._judged(), in_place=True)[number]
                buffers = {**self._of_windows.buffers(), **self._of_windows.window_buffers(way.window)}
                self._truth_of[key] = judged_action(action, self._rows_of(action), buffers)
            return self._truth_of[key]

        return make

    def _rows_of(self, action: WindowInputs) -> list[int]:
        """The judged rows of a point, and those whose windows are emptiest and fullest, and half full."""
        lengths = action.window.length[action.s_offsets.long()]
        order = lengths.argsort()
        return sorted({*self._rows, *(int(order[n * (len(order) - 1) // 2]) for n in range(3))})

    def _floor_subject(self) -> GridSubject | None:
        """Where the floor is judged that has a pool of its own."""
        tensors = self._of_windows.yardstick
        if tensors is None:
            return None
        return GridSubject(replace(self.point, state_dtype=torch.float32), tensors)


def check_layers_fit(points: Sequence[GridPoint], spec: WindowSpec) -> None:
    """Refuse a commit of more layers than a pool holds.

    Raises
    ------
    UsageError
        It does.
    """
    for point in points:
        if spec.op == "commit" and spec.layers > point.chunks:
            raise UsageError(
                f"--layers: the pool holds the states of {point.chunks} layers of {point.name}, got {spec.layers}. "
                "Pass fewer, or smaller sizes."
            )


def estimate_window_seconds(point: GridPoint, variants: Sequence[str], effort: Effort, spec: WindowSpec) -> float:
    """About how long all variants take at a point."""
    seconds = estimate_seconds(point, variants, effort, launches=LAUNCHES[spec.op] * spec.layers)
    return seconds + TRUTH_S * (len(spec.places) + 1)


def run_window(
    points: Sequence[GridPoint],
    spec: WindowSpec,
    variants: Sequence[Variant],
    device: torch.device,
    environment: Environment,
    effort: Effort,
    *,
    say: Say = lambda point, doing: None,
    tick: Tick = lambda done: None,
    keep: Keep = lambda rows: None,
) -> list[Row]:
    """A row for every variant at every point; see :func:`la_bench.run_compare.compare_subjects`."""
    tensors = WindowTensors(points, spec, device, environment.seed)
    names = [variant.name for variant in variants]
    costs = [estimate_window_seconds(point, names, effort, spec) for point in points]
    subjects = [WindowSubject(point, tensors, spec) for point in points]
    return compare_subjects(subjects, variants, device, environment, effort, costs, say=say, tick=tick, keep=keep)
