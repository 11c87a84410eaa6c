"""Named workloads: a model, a load, and the batches that a simulated engine runs under it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from la_bench.errors import UsageError
from la_bench.models import MODELS, Model
from la_bench.trace import Load, sample_steps
from la_core import DecodeProblem

BATCHES = 6
"""Batches in one walk: enough for several batch sizes, few enough that a walk of the heaviest takes about 0.1 s."""

LOADS = {
    "cpu": {"light": Load(live=4, slots=32), "medium": Load(live=24, slots=40), "heavy": Load(live=60, slots=80)},
    "cuda": {"light": Load(live=8, slots=64), "medium": Load(live=64, slots=96), "heavy": Load(live=256, slots=320)},
}
"""By type of device, then by name. Pools hold more slots than live requests, as engines keep some for prefixes."""

QUICK_LOADS = ("light", "medium")
"""What `--quick` runs when no workload is named."""


@dataclass(frozen=True)
class Workload:
    """Calls to time, all legal, all of one model.

    Attributes
    ----------
    name
        `model/load`.
    model, load
        What runs and how busy it is.
    batches
        Offsets of each batch, padding included.
    """

    name: str
    model: Model
    load: Load
    batches: tuple[tuple[int, ...], ...]

    @property
    def live_rows(self) -> tuple[int, ...]:
        """Live rows of each batch."""
        return tuple(sum(slot >= 0 for slot in batch) for batch in self.batches)

    @property
    def padded_rows(self) -> tuple[int, ...]:
        """Rows of each batch, padding included."""
        return tuple(len(batch) for batch in self.batches)

    @property
    def description(self) -> str:
        """One sentence."""
        model = self.model
        return (
            f"{model.title}: {model.heads} of {model.num_heads} heads, {len(model.linear_layers)} linear layers of "
            f"{model.num_layers}; about {self.load.live} requests running in a pool of {self.load.slots} slots, "
            f"batches of {_span(self.live_rows)} live rows padded to {_span(self.padded_rows)}"
        )

    def problem(self, rows: int, device: str) -> DecodeProblem:
        """The facts of a call with `rows` rows, for questions asked without tensors."""
        size = self.model.head_size
        return DecodeProblem.contiguous(B=rows, P=self.load.slots, H=self.model.heads, K=size, V=size, device=device)

    @property
    def bytes_per_walk(self) -> int:
        """Fewest bytes that all batches can move: states of live rows only, everything else of every row."""
        total = 0
        for live, rows in zip(self.live_rows, self.padded_rows, strict=True):
            problem = self.problem(rows, "cpu")
            total += problem.bytes_moved() - 2 * problem.state_bytes * (rows - live) // rows
        return total


def workload_names(device_type: str) -> tuple[str, ...]:
    """Names of all workloads of a type of device."""
    return tuple(f"{model.name}/{load}" for model in MODELS for load in LOADS[device_type])


def make_workload(name: str, device_type: str, seed: int) -> Workload:
    """The workload of that name; its batches depend on name, type of device and seed alone."""
    model_name, load_name = name.split("/")
    model = next(m for m in MODELS if m.name == model_name)
    load = LOADS[device_type][load_name]
    # Each workload draws a trace of its own.
    trace_seed = 1000 * seed + workload_names(device_type).index(name)
    return Workload(name, model, load, tuple(step.offsets for step in sample_steps(load, BATCHES, trace_seed)))


def select_workloads(device_type: str, wanted: Sequence[str], *, quick: bool) -> tuple[str, ...]:
    """Names of the workloads that are in `wanted` or start with one of them; without any, or for `all`, all of them
    (`quick`: small ones).

    Raises
    ------
    UsageError
        A wanted name matches nothing.
    """
    known = workload_names(device_type)
    wanted = [name for name in wanted if name != "all"]
    for name in wanted:
        if not any(one.startswith(name) for one in known):
            raise UsageError(f"no workload is called {name!r} or starts with it. Known: {', '.join(known)}.")
    if wanted:
        return tuple(one for one in known if one.startswith(tuple(wanted)))
    return tuple(one for one in known if not quick or one.split("/")[1] in QUICK_LOADS)


def _span(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"
