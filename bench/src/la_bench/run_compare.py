"""Backends x workloads -> rows. The gate comes first; only what passed it is timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from la_bench.accuracy import Gate, Verdict
from la_bench.cpu_timing import time_on_cpu
from la_bench.environment import Environment
from la_bench.errors import UsageError
from la_bench.extra_memory import peak_extra_bytes
from la_bench.gpu_timing import time_on_gpu
from la_bench.roofline import roofline
from la_bench.rows import SCHEMA, BackendFacts, Result, Row, Status, WorkloadFacts
from la_bench.tensors import Batch, Layer, WorkloadTensors, make_arena, make_tensors, reuse_distance
from la_bench.timing import Call, CopyProbe, Effort, Tick, Timing, part_of, spread
from la_bench.workloads import Workload
from la_core import BackendUnavailable, UnsupportedByBackend, decode, explain_choice, list_backends
from la_core.backends.discover_backends import KNOWN_NAMES, installed_names, load_backend
from la_core.conformance.source_hash import source_hash

BASELINE = "ref"
"""The backend that speed-ups are relative to."""

Say = Callable[[str, str], None]
"""Told which workload is being worked on, and what is done with it."""


@dataclass(frozen=True)
class Outcome:
    """How a backend fared on a workload, and why if it has no result."""

    status: Status
    reason: str | None


def select_backends(wanted: Sequence[str]) -> tuple[str, ...]:
    """The baseline, then the `wanted` backends, or all that are installed or belong to this project.

    Raises
    ------
    UsageError
        A wanted name is neither.
    """
    known = dict.fromkeys((BASELINE, *KNOWN_NAMES, *installed_names()))
    for name in wanted:
        if name not in known:
            raise UsageError(
                f"no backend is called {name!r}. Installed: {', '.join(installed_names()) or 'none'}; "
                f"of this project: {', '.join(KNOWN_NAMES)}."
            )
    return tuple(dict.fromkeys((BASELINE, *wanted))) if wanted else tuple(known)


def run_compare(
    workloads: Sequence[Workload],
    backends: Sequence[str],
    device: torch.device,
    environment: Environment,
    effort: Effort,
    *,
    say: Say = lambda workload, doing: None,
    tick: Tick = lambda done: None,
) -> list[Row]:
    """A row for every backend on every workload, in that order.

    Ctrl-C ends the run early: finished workloads keep their rows, the others get rows that say so.
    """
    rows: list[Row] = []
    facts = {name: backend_facts(name) for name in backends}
    try:
        copy = CopyProbe(device)
        for number, workload in enumerate(workloads):
            comparison = _Comparison(workload, facts, device, environment, copy, effort)
            rows += comparison.rows(say, part_of(tick, number, len(workloads)))
    except KeyboardInterrupt:
        for workload in workloads[len(rows) // len(backends) :]:
            described = describe_workload(workload, device.type, ())
            choice = _auto_choice(workload, device)
            reason = "stopped by Ctrl-C before this workload was finished"
            for name in backends:
                rows.append(Row(SCHEMA, described, facts[name], "interrupted", reason, None, choice, environment))
    return rows


class _Comparison:
    """All backends on one workload."""

    def __init__(
        self,
        workload: Workload,
        backends: dict[str, BackendFacts],
        device: torch.device,
        environment: Environment,
        copy: CopyProbe,
        effort: Effort,
    ) -> None:
        self.workload, self.backends, self.device = workload, backends, device
        self.environment, self.copy, self.effort = environment, copy, effort
        self.outcomes: dict[str, Outcome] = {}
        self.verdicts: dict[str, Verdict] = {}
        self.extra_bytes: dict[str, int] = {}
        self.timing = Timing.empty({})
        self.calls_per_sample = 0
        self.layers_timed: list[int] = []

    def rows(self, say: Say, tick: Tick) -> list[Row]:
        """One row per backend."""
        self._judge(say)
        if self.verdicts:
            # After the gate: float64 truths and pools together would take twice the memory.
            self._time(say, tick)
        tick(1.0)
        described = describe_workload(self.workload, self.device.type, self.layers_timed)
        choice = _auto_choice(self.workload, self.device)
        rows = []
        for backend, facts in self.backends.items():
            outcome, result = self.outcomes.get(backend), None
            if outcome is None:
                outcome, result = Outcome("ok", None), self._result(backend)
            rows.append(Row(SCHEMA, described, facts, outcome.status, outcome.reason, result, choice, self.environment))
        return rows

    def _judge(self, say: Say) -> None:
        """Sort backends into those with a verdict and those with an outcome."""
        name = self.workload.name
        say(name, "computing the truth")
        gate = Gate(self.workload, self.device, self.environment.seed)
        for backend in self.backends:
            say(name, f"judging {backend}")
            try:
                verdict = gate.judge(backend)
            except Exception as reason:
                self.outcomes[backend] = outcome_of(reason)
                continue
            if verdict.faults:
                self.outcomes[backend] = Outcome("failed", "; ".join(verdict.faults))
            else:
                self.verdicts[backend] = verdict

    def _time(self, say: Say, tick: Tick) -> None:
        """Measure memory and time of the backends that passed."""
        name = self.workload.name
        say(name, "filling the pools")
        tensors = make_tensors(self.workload, make_arena(self.workload, self.device), self.environment.seed)
        calls: dict[str, Call] = {}
        for backend in self.verdicts:
            call = _call(backend)
            try:
                self.extra_bytes[backend] = self._peak_of_largest(call, tensors)
                calls[backend] = call
            except Exception as reason:
                self.outcomes[backend] = outcome_of(reason)
        say(name, "timing")
        on_gpu = self.device.type == "cuda"
        if calls:
            time = time_on_gpu if on_gpu else time_on_cpu
            self.timing = time(tensors, calls, self.copy, self.effort, tick)
        self.outcomes.update({backend: outcome_of(reason) for backend, reason in self.timing.errors.items()})
        self.calls_per_sample = len(tensors.lap if on_gpu else tensors.batches)
        self.layers_timed = [layer.number for layer in tensors.layers]

    def _peak_of_largest(self, call: Call, tensors: WorkloadTensors) -> int:
        """Extra memory of a call with the largest batch, after a first call that may allocate for good."""
        batch = max(tensors.batches, key=lambda batch: batch.q.shape[0])
        call(batch, tensors.layers[0])
        return peak_extra_bytes(lambda: call(batch, tensors.layers[0]), self.device)

    def _result(self, backend: str) -> Result:
        timing, verdict = self.timing, self.verdicts[backend]
        time = spread(timing.seconds[backend])
        line = roofline(
            self.workload.bytes_per_walk / len(self.workload.batches), time.median, self.copy.bytes, timing.copy_seconds
        )
        baseline = [] if BASELINE in timing.errors else timing.seconds.get(BASELINE)
        return Result(
            time_us=time.median * 1e6,
            time_us_p20=time.p20 * 1e6,
            time_us_p80=time.p80 * 1e6,
            samples=len(timing.seconds[backend]),
            calls_per_sample=self.calls_per_sample,
            gb_per_s=line.gb_per_s,
            copy_gb_per_s=line.copy_gb_per_s,
            share_of_copy=line.share_of_copy,
            copy_floor_us=line.copy_floor_us,
            speedup_vs_ref=spread(baseline).median / time.median if baseline else None,
            out_error=verdict.out_error,
            state_error=verdict.state_error,
            extra_bytes=self.extra_bytes[backend],
        )


def outcome_of(reason: Exception) -> Outcome:
    """The status that an exception stands for, and its sentence."""
    if isinstance(reason, UnsupportedByBackend):
        return Outcome("refused", str(reason))
    if isinstance(reason, BackendUnavailable):
        return Outcome("unavailable", str(reason))
    return Outcome("error", f"{type(reason).__name__}: {reason}")


def backend_facts(name: str) -> BackendFacts:
    """Distribution and source of an installed backend, as far as they can be had."""
    distribution = next((info.distribution for info in list_backends() if info.name == name), None)
    try:
        return BackendFacts(name, distribution, source_hash(type(load_backend(name)).__module__))
    except BackendUnavailable:
        return BackendFacts(name, distribution, None)


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
        io_dtype=_short(problem.io_dtype),
        state_dtype=_short(problem.state_dtype),
        out_dtype=_short(problem.out_dtype),
        offsets_dtype=_short(problem.offsets_dtype),
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


def _call(backend: str) -> Call:
    def call(batch: Batch, layer: Layer) -> torch.Tensor:
        return decode(
            batch.q, batch.k, batch.v, layer.pool, batch.s_offsets, layer.decay_scales, out=batch.out, backend=backend
        )

    return call


def _auto_choice(workload: Workload, device: torch.device) -> str:
    """What `backend="auto"` would run, with the reason for every other backend."""
    return str(explain_choice(workload.problem(max(workload.padded_rows), device.type)))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
