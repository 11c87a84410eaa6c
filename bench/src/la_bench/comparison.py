"""All variants on one subject, a workload or a point of a grid: the gate first, then memory and time of what passed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from la_bench.accuracy import Verdict
from la_bench.cpu_timing import time_on_cpu
from la_bench.environment import Environment
from la_bench.extra_memory import peak_extra_bytes
from la_bench.gpu_state import UNKNOWN, read_gpu
from la_bench.gpu_timing import GraphTimer
from la_bench.kernel_watch import KernelWatch
from la_bench.peers.peer import PeerRefusal, PeerUnavailable
from la_bench.roofline import roofline
from la_bench.rows import SCHEMA, Accuracy, Result, Row, Status, WorkloadFacts
from la_bench.tensors import DecodeCall
from la_bench.timing import CopyProbe, Effort, Lap, Tick, Timing, spread
from la_bench.variants import BASELINE, Variant
from la_core import BackendUnavailable, DecodeProblem, UnsupportedByBackend, WindowProblem, explain_choice

Say = Callable[[str, str], None]
"""Told which subject is being worked on, and what is done with it."""


@dataclass(frozen=True)
class SubjectCalls:
    """The calls of a subject.

    Attributes
    ----------
    lap
        All calls, in order, in the layout that was asked for.
    stride
        Calls of one walk: the first ones hold every distinct batch.
    largest, smallest
        Indices of a call with most rows, and of those whose host time is taken; none if it is not.
    """

    lap: Sequence[DecodeCall]
    stride: int
    largest: int
    smallest: Sequence[int]


class Subject(ABC):
    """What variants are compared on.

    Attributes
    ----------
    name
        As in rows.
    bytes_per_call
        Fewest bytes that a call can move, on average.
    problem
        The facts of the largest call.
    padded
        Whether some offsets are negative.
    """

    name: str
    bytes_per_call: float
    problem: DecodeProblem
    padded: bool

    @property
    def asked(self) -> DecodeProblem | WindowProblem:
        """The facts of a call for which rows say what `backend="auto"` runs."""
        return self.problem

    def bytes_of(self, variant: Variant) -> float:
        """Fewest bytes that a call of a variant can move: as many as any, but for variants that do something else."""
        return self.bytes_per_call

    def rivals(self, variant: Variant) -> dict[str, str]:
        """Names of other variants that the time of one is set against, by what they are."""
        return {}

    @abstractmethod
    def start_judging(self) -> None:
        """Compute what all verdicts need."""

    @abstractmethod
    def judge(self, variant: Variant) -> Verdict:
        """Let the variant make a call, and compare; what it raises propagates."""

    @abstractmethod
    def calls(self) -> SubjectCalls:
        """The calls to time, on the device."""

    @abstractmethod
    def facts(self) -> WorkloadFacts:
        """What rows say about it; complete once the calls have been made up."""


@dataclass(frozen=True)
class Bench:
    """What all subjects of a run share."""

    variants: Sequence[Variant]
    device: torch.device
    environment: Environment
    copy: CopyProbe
    effort: Effort
    timer: GraphTimer | None


@dataclass(frozen=True)
class Outcome:
    """How a variant fared on a subject, and why if it has no result."""

    status: Status
    reason: str | None


class Comparison:
    """All variants on one subject."""

    def __init__(self, subject: Subject, bench: Bench) -> None:
        self.subject, self.bench = subject, bench
        self.outcomes: dict[str, Outcome] = {}
        self.verdicts: dict[str, Verdict] = {}
        self.checked: dict[str, Accuracy] = {}
        self.watches: dict[str, KernelWatch | None] = {}
        self.extra_bytes: dict[str, int] = {}
        self.tiles: dict[str, str | None] = {}
        self.timing = Timing.empty(())
        self.host: dict[str, list[float]] = {}
        self.calls_per_sample = 0
        self.clocks = UNKNOWN

    def rows(self, say: Say, tick: Tick) -> list[Row]:
        """One row per variant.

        What the subject raises itself (no memory left, a GPU that some call has spoilt) is an error of all variants
        that have no outcome yet: rows of finished subjects must not be lost to it.
        """
        try:
            self._judge(say)
            if self.verdicts:
                # After the gate: float64 truths and pools together would take twice the memory.
                self._time(say, tick)
        except Exception as reason:
            for variant in self.bench.variants:
                self.outcomes.setdefault(variant.name, outcome_of(reason))
        tick(1.0)
        facts, choice = self.subject.facts(), auto_choice(self.subject)
        results = self._results()
        rows = []
        for variant in self.bench.variants:
            outcome = self.outcomes.get(variant.name, Outcome("ok", None))
            result, accuracy = results.get(variant.name), self.checked.get(variant.name)
            what = (outcome.status, outcome.reason, result, choice, self.bench.environment, accuracy)
            watch = self.watches.get(variant.name)
            kernels = watch.kernels() if watch else None
            rows.append(Row(SCHEMA, facts, variant.facts, *what, kernels, variant.places, variant.way_in_words))
        return rows

    def _judge(self, say: Say) -> None:
        """Sort variants into those with a verdict and those with an outcome."""
        name = self.subject.name
        say(name, "computing the truth")
        self.subject.start_judging()
        for variant in self.bench.variants:
            say(name, f"judging {variant.name}")
            try:
                variant.start()
                self.watches[variant.name] = variant.watch
                variant.check(self.subject.problem, padded=self.subject.padded)
                verdict = self.subject.judge(variant)
            except Exception as reason:
                self.outcomes[variant.name] = outcome_of(reason)
                continue
            if verdict.faults:
                self.outcomes[variant.name] = Outcome("failed", "; ".join(verdict.faults))
            elif variant.untimed is not None:
                self.outcomes[variant.name] = Outcome("checked", variant.untimed)
                self.checked[variant.name] = Accuracy(verdict.out_error, verdict.state_error)
            else:
                self.verdicts[variant.name] = verdict

    def _time(self, say: Say, tick: Tick) -> None:
        """Measure memory and time of the variants that passed."""
        name = self.subject.name
        say(name, "filling the pools")
        calls = self.subject.calls()
        laps: dict[str, Lap] = {}
        hosts: dict[str, Lap] = {}
        for variant in self.bench.variants:
            if variant.name not in self.verdicts:
                continue
            say(name, f"preparing {variant.name}")
            try:
                if self.bench.timer is not None:
                    variant.prepare(calls.lap, self.bench.timer)
                self.tiles[variant.name] = variant.tiles(calls.lap[calls.largest])
                lap = variant.lap(calls.lap, calls.stride)
                watch = self.watches[variant.name]
                if watch is not None:
                    watch.make_all(lap)
                self.extra_bytes[variant.name] = self._extra_bytes(lap, calls.largest)
                laps[variant.name] = lap
                hosts[variant.name] = replace(lap, calls=[lap.calls[n] for n in calls.smallest], distinct=0)
            except Exception as reason:
                self.outcomes[variant.name] = outcome_of(reason)
        say(name, "timing")
        if not laps:
            return
        timer, tools = self.bench.timer, (self.bench.copy, self.bench.effort, tick)
        self.timing = time_on_cpu(laps, calls.stride, *tools) if timer is None else timer.time(laps, *tools)
        # Before the card cools down, or its clocks do.
        self.clocks = read_gpu(self.bench.device)
        if timer is not None:
            good = {name: lap for name, lap in hosts.items() if lap.calls and name not in self.timing.errors}
            self.host = timer.host(good)
        self.outcomes.update({variant: outcome_of(reason) for variant, reason in self.timing.errors.items()})
        self.calls_per_sample = calls.stride if self.bench.timer is None else len(calls.lap)

    def _extra_bytes(self, lap: Lap, largest: int) -> int:
        """Extra memory of a call with the largest batch, after a first call that may allocate for good."""
        with lap.inside():
            lap.calls[largest]()
            return peak_extra_bytes(lap.calls[largest], self.bench.device)

    def _results(self) -> dict[str, Result]:
        medians = {name: median for name, median in self.timing.medians().items() if name not in self.outcomes}
        kinds = {variant.name: variant.facts for variant in self.bench.variants}
        floors = {kinds[name].overlap: median for name, median in medians.items() if kinds[name].kind == "floor"}
        peer = min((median for name, median in medians.items() if kinds[name].kind == "peer"), default=None)
        results = {}
        for variant in self.bench.variants:
            name = variant.name
            if name not in medians:
                continue
            time, verdict = spread(self.timing.seconds[name]), self.verdicts[name]
            line = roofline(
                self.subject.bytes_of(variant), time.median, self.bench.copy.bytes, self.timing.copy_seconds
            )
            host = spread(self.host[name]) if self.host.get(name) else None
            floor = floors.get(variant.facts.overlap)
            rivals = self.subject.rivals(variant).items()
            over = {role: time.median / medians[rival] for role, rival in rivals if rival in medians}
            results[name] = Result(
                time_us=time.median * 1e6,
                time_us_p20=time.p20 * 1e6,
                time_us_p80=time.p80 * 1e6,
                samples=len(self.timing.seconds[name]),
                calls_per_sample=self.calls_per_sample,
                gb_per_s=line.gb_per_s,
                copy_gb_per_s=line.copy_gb_per_s,
                share_of_copy=line.share_of_copy,
                copy_floor_us=line.copy_floor_us,
                speedup_vs_ref=medians[BASELINE] / time.median if BASELINE in medians else None,
                speedup_vs_peer=peer / time.median if peer is not None else None,
                share_of_floor=floor / time.median if floor is not None else None,
                out_error=verdict.out_error,
                state_error=verdict.state_error,
                state_layout=variant.layout(self.subject.problem.state_layout),
                extra_bytes=self.extra_bytes[name],
                host_us=host.median * 1e6 if host else None,
                host_us_p20=host.p20 * 1e6 if host else None,
                host_us_p80=host.p80 * 1e6 if host else None,
                tiles=self.tiles.get(name),
                sm_mhz=self.clocks.sm_mhz,
                memory_mhz=self.clocks.memory_mhz,
                time_over=over or None,
            )
        return results


def outcome_of(reason: Exception) -> Outcome:
    """The status that an exception stands for, and its sentence."""
    if isinstance(reason, UnsupportedByBackend | PeerRefusal):
        return Outcome("refused", str(reason))
    if isinstance(reason, BackendUnavailable | PeerUnavailable):
        return Outcome("unavailable", str(reason))
    return Outcome("error", f"{type(reason).__name__}: {reason}")


def auto_choice(subject: Subject) -> str:
    """What `backend="auto"` would run, with the reason for every other backend."""
    return str(explain_choice(subject.asked))
