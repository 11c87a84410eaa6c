"""Variants x subjects -> rows. The gate comes first; only what passed it is timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from la_bench.accuracy import Gate, Verdict
from la_bench.comparison import Bench, Comparison, Say, Subject, SubjectCalls, auto_choice
from la_bench.environment import Environment
from la_bench.gpu_timing import GraphTimer
from la_bench.rows import SCHEMA, Row, WorkloadFacts
from la_bench.tensors import make_arena, make_tensors, reuse_distance
from la_bench.timing import CopyProbe, Effort, Tick
from la_bench.variants import Variant
from la_bench.workloads import Workload

Keep = Callable[[Sequence[Row]], None]
"""Given finished rows, to put them where they are safe."""

INTERRUPTED = "stopped by Ctrl-C before it was finished"

SETUP_S = {"cpu": 3.0, "cuda": 2.0}
"""Of each workload: float64 truths, and filling its pools."""

VARIANT_S = 0.15
"""Of each variant on a workload: judging it, and what it takes to make its calls ready."""


class WorkloadSubject(Subject):
    """A named workload on a device."""

    def __init__(self, workload: Workload, device: torch.device, seed: int) -> None:
        self.workload, self.device, self.seed = workload, device, seed
        self.name = workload.name
        self.bytes_per_call = workload.bytes_per_walk / len(workload.batches)
        self.problem = workload.problem(max(workload.padded_rows), device.type)
        self.padded = workload.padded_rows != workload.live_rows
        self._layers_timed: list[int] = []
        self._gate: Gate | None = None

    def start_judging(self) -> None:
        """See :class:`Subject`."""
        self._gate = Gate(self.workload, self.device, self.seed)

    def judge(self, variant: Variant) -> Verdict:
        """See :class:`Subject`."""
        assert self._gate is not None
        return self._gate.judge(variant)

    def calls(self) -> SubjectCalls:
        """See :class:`Subject`."""
        self._gate = None
        tensors = make_tensors(self.workload, make_arena(self.workload, self.device), self.seed)
        self._layers_timed = [layer.number for layer in tensors.layers]
        lap = [batch.on(layer) for batch, layer in tensors.lap]
        rows = [len(call.q) for call in lap]
        smallest = [n for n, count in enumerate(rows) if count == min(rows)]
        return SubjectCalls(lap, len(tensors.batches), rows.index(max(rows)), smallest)

    def facts(self) -> WorkloadFacts:
        """See :class:`Subject`."""
        return describe_workload(self.workload, self.device.type, self._layers_timed)


def run_compare(
    workloads: Sequence[Workload],
    variants: Sequence[Variant],
    device: torch.device,
    environment: Environment,
    effort: Effort,
    *,
    say: Say = lambda workload, doing: None,
    tick: Tick = lambda done: None,
    keep: Keep = lambda rows: None,
) -> list[Row]:
    """A row for every variant on every workload, in that order; see :func:`compare_subjects`."""
    subjects = [WorkloadSubject(workload, device, environment.seed) for workload in workloads]
    costs = [1.0] * len(subjects)
    return compare_subjects(subjects, variants, device, environment, effort, costs, say=say, tick=tick, keep=keep)


def estimate_workload_seconds(variants: int, effort: Effort, device_type: str) -> float:
    """About how long so many variants take on a workload."""
    return SETUP_S[device_type] + variants * VARIANT_S + effort.seconds


def compare_subjects(
    subjects: Sequence[Subject],
    variants: Sequence[Variant],
    device: torch.device,
    environment: Environment,
    effort: Effort,
    costs: Sequence[float],
    *,
    say: Say,
    tick: Tick,
    keep: Keep,
) -> list[Row]:
    """A row for every variant on every subject, in that order; `costs` are the subjects' shares of the time.

    `keep` gets the rows of each subject as soon as it is finished.

    Ctrl-C ends the run early: finished subjects keep their rows, the others get rows that say so.
    """
    rows: list[Row] = []
    try:
        timer = GraphTimer() if device.type == "cuda" else None
        bench = Bench(variants, device, environment, CopyProbe(device), effort, timer)
        for number, subject in enumerate(subjects):
            finished = Comparison(subject, bench).rows(say, _share_of(tick, costs, number))
            rows += finished
            keep(finished)
    except KeyboardInterrupt:
        stopped = [
            Row(
                SCHEMA,
                subject.facts(),
                variant.facts,
                "interrupted",
                INTERRUPTED,
                None,
                auto_choice(subject),
                environment,
            )
            for subject in subjects[len(rows) // len(variants) :]
            for variant in variants
        ]
        rows += stopped
        keep(stopped)
    return rows


def describe_workload(workload: Workload, device_type: str, layers_timed: Sequence[int]) -> WorkloadFacts:
    """The facts that a row holds."""
    problem = workload.problem(max(workload.padded_rows), device_type)
    return WorkloadFacts(
        name=workload.name,
        description=workload.description,
        model=workload.model.title,
        load=workload.name.split("/")[1],
        H=problem.H,
        G=problem.G,
        K=problem.K,
        V=problem.V,
        io_dtype=short(problem.io_dtype),
        state_dtype=short(problem.state_dtype),
        out_dtype=short(problem.out_dtype),
        offsets_dtype=short(problem.offsets_dtype),
        state_layout=problem.state_layout,
        pool_slots=problem.P,
        live_rows=list(workload.live_rows),
        padded_rows=list(workload.padded_rows),
        slopes=workload.model.convention,
        linear_layers=len(workload.model.linear_layers),
        layers_timed=list(layers_timed),
        bytes_per_call=workload.bytes_per_walk / len(workload.batches),
        reuse_bytes=reuse_distance(workload, max(1, len(layers_timed))),
    )


def short(dtype: torch.dtype) -> str:
    """A dtype's name without its module."""
    return str(dtype).removeprefix("torch.")


def _share_of(tick: Tick, costs: Sequence[float], number: int) -> Callable[[float], None]:
    total, before = sum(costs), sum(costs[:number])
    return lambda done: tick((before + done * costs[number]) / total)
