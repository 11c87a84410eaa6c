"""One row of a report: everything about one backend on one workload, in one JSON object."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from la_bench.environment import Environment

SCHEMA = 2
"""Raised when a field changes its meaning or goes away."""

Status = Literal["ok", "checked", "failed", "refused", "unavailable", "error", "interrupted"]
"""`ok`: right and timed. `checked`: right, and not timed, since it ran under an interpreter. `failed`: the gate found
it wrong. `refused`: the backend will not run this legal call. `unavailable`: not installed or not loadable. `error`: it
raised. `interrupted`: Ctrl-C came first."""


Kind = Literal["backend", "floor", "peer"]
"""`backend`: one of la-core's. `floor`: the in-place floor. `peer`: a public kernel of others, or plain torch."""


@dataclass(frozen=True)
class WorkloadFacts:
    """What was run. Sizes, dtypes and layout as in :class:`la_core.DecodeProblem`; byte counts are per call.

    `grid` marks a point of a grid of sizes, which belongs to no model.

    Attributes
    ----------
    op
        What was measured, if not decode: `deferred`, `verify` or `commit`.
    drafts, layers
        Draft tokens of a row; layers that share a launch. None for decode and deferred.
    accepted
        How the drafts that are accepted were drawn.
    floor_dtype
        Of the states of the in-place floor, where it is a yardstick that does not follow `state_dtype`.
    """

    name: str
    description: str
    model: str
    load: str
    H: int
    G: int
    K: int
    V: int
    io_dtype: str
    state_dtype: str
    out_dtype: str
    offsets_dtype: str
    state_layout: str
    pool_slots: int
    live_rows: list[int]
    padded_rows: list[int]
    slopes: str
    linear_layers: int
    layers_timed: list[int]
    bytes_per_call: float
    reuse_bytes: int
    grid: bool = False
    op: str | None = None
    drafts: int | None = None
    layers: int | None = None
    accepted: str | None = None
    floor_dtype: str | None = None


@dataclass(frozen=True)
class BackendFacts:
    """Who ran it.

    Attributes
    ----------
    source_hash
        Covers the files of the backend's package, or the file of a peer; None if there are none.
    overlap
        Whether kernels may start before the one before has ended.
    note
        In which ways a peer does not do what the contract says.
    """

    name: str
    distribution: str | None
    source_hash: str | None
    kind: Kind = "backend"
    overlap: bool = False
    note: str | None = None


@dataclass(frozen=True)
class Result:
    """What was measured. Times are microseconds per call, errors relative L2 norms in the worst (row, head).

    Attributes
    ----------
    share_of_floor
        Time of the in-place floor of the same kind, with or without overlap, over this one's.
    speedup_vs_peer
        How many times faster than the fastest peer.
    out_error
        None for the floor, which has no output.
    state_layout
        How the states lay in memory: some peers know only one way.
    host_us, host_us_p20, host_us_p80
        Time that Python is busy with a call; None on a CPU, where it is part of the call, and where it was not taken.
    tiles
        What the largest call ran with; None where nobody can tell.
    sm_mhz, memory_mhz
        Clocks of the GPU directly after the samples; None on a CPU, where the card does not say, and in older rows.
    time_over
        This one's time over that of others in the same rounds, by what they are: see :mod:`la_bench.report_window`.
    """

    time_us: float
    time_us_p20: float
    time_us_p80: float
    samples: int
    calls_per_sample: int
    gb_per_s: float
    copy_gb_per_s: float
    share_of_copy: float
    copy_floor_us: float
    speedup_vs_ref: float | None
    speedup_vs_peer: float | None
    share_of_floor: float | None
    out_error: float | None
    state_error: float
    state_layout: str
    extra_bytes: int
    host_us: float | None
    host_us_p20: float | None
    host_us_p80: float | None
    tiles: str | None
    sm_mhz: int | None = None
    memory_mhz: int | None = None
    time_over: dict[str, float] | None = None


@dataclass(frozen=True)
class Accuracy:
    """Errors of what was judged and not timed, as in :class:`Result`."""

    out_error: float | None
    state_error: float


@dataclass(frozen=True)
class KernelsMade:
    """Kernels that a backend made ready for a workload: those that it had not made in this run before.

    Attributes
    ----------
    seconds
        What the calls in which they were made took beyond later ones; the first also imports a compiler, if one is
        needed.
    origins
        How many were prebuilt, found on disk or compiled; None where the backend does not say.
    """

    count: int
    seconds: float
    origins: dict[str, int] | None


@dataclass(frozen=True)
class Row:
    """A backend on a workload.

    `result` is there exactly if `status` is `ok`, `reason` exactly if it is not, `accuracy` exactly if it is `checked`.
    `kernels` is None where nobody can tell, and in older rows. `window` is the places of the window that was used, None
    without one, and `way` what was done with it, in words.
    """

    schema: int
    workload: WorkloadFacts
    backend: BackendFacts
    status: Status
    reason: str | None
    result: Result | None
    auto_choice: str
    environment: Environment
    accuracy: Accuracy | None = None
    kernels: KernelsMade | None = None
    window: int | None = None
    way: str | None = None


def to_json_lines(rows: Iterable[Row]) -> str:
    """One object a line, in ASCII: no character in a reason can end a line or fail to be written."""
    return "".join(json.dumps(_to_dict(row)) + "\n" for row in rows)


def from_json_lines(text: str) -> list[Row]:
    """The rows of a `rows.jsonl`; see :func:`cut_off`."""
    lines = text.split("\n")
    return [_from_dict(json.loads(line)) for line in (lines[:-1] if cut_off(text) else lines) if line.strip()]


def cut_off(text: str) -> bool:
    """Whether a run that was killed left half a row at the end, which is then left out."""
    try:
        json.loads(text.rpartition("\n")[2] or "{}")
    except ValueError:
        return True
    return False


def ok_rows(rows: Sequence[Row]) -> list[tuple[Row, Result]]:
    """Rows that carry a result."""
    return [(row, row.result) for row in rows if row.result is not None]


def _to_dict(row: Row) -> dict[str, Any]:
    """All fields, but for those that came later and are not known: old rows stay as they were."""
    data = _without_later(row, asdict(row))
    data["environment"] = _without_later(row.environment, data["environment"])
    data["workload"] = _without_later(row.workload, data["workload"])
    if row.result is not None:
        data["result"] = _without_later(row.result, data["result"])
    return data


def _without_later(holder: Row | Environment | Result | WorkloadFacts, data: dict[str, Any]) -> dict[str, Any]:
    later = [field.name for field in fields(holder) if field.default is None]
    return {name: value for name, value in data.items() if value is not None or name not in later}


def _from_dict(data: Any) -> Row:
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != SCHEMA:
        raise ValueError(f"row schema must be {SCHEMA}, got {schema!r}")
    return Row(
        **{
            **data,
            "workload": WorkloadFacts(**data["workload"]),
            "backend": BackendFacts(**data["backend"]),
            "result": None if data["result"] is None else Result(**data["result"]),
            "environment": Environment(**data["environment"]),
            "accuracy": Accuracy(**data["accuracy"]) if "accuracy" in data else None,
            "kernels": KernelsMade(**data["kernels"]) if "kernels" in data else None,
        }
    )
