"""Variants x points of a grid -> rows; all points share one pool and one set of inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from la_bench.accuracy import Verdict, allowed_truth, floor_faults
from la_bench.comparison import Say, Subject, SubjectCalls
from la_bench.environment import Environment
from la_bench.grid import HOST_BYTES, SIZE, GridPoint, estimate_seconds
from la_bench.rows import Row, WorkloadFacts
from la_bench.run_compare import Keep, compare_subjects, short
from la_bench.tensors import DecodeCall
from la_bench.timing import Effort, Tick
from la_bench.variants import Variant
from la_core import DecodeProblem, decode_problem
from la_core.conformance.compare import out_errors, state_errors, worst_out_error, worst_state_error
from la_core.conformance.decode_truth import DecodeTruth, decode_truth

JUDGED_ROWS = 6
"""Rows of a call whose values are judged: the first, the last and some between. All slots are watched."""

PIECE = 1 << 26
"""Values that are compared at once."""

PERIOD = (1 << 24) + 43
"""Random values of a pool repeat after so many, which puts no two equal states into it."""


class GridTensors:
    """Memory that all points of a grid share: a pool of the largest size, q, k, v and out."""

    def __init__(self, points: Sequence[GridPoint], device: torch.device, seed: int) -> None:
        self.device = device
        self._random = torch.Generator().manual_seed(seed)
        io = max(point.B * point.H for point in points) * SIZE
        self._q, self._k, self._v = (self._normal(io, points[0].io_dtype) for _ in range(3))
        self._out = torch.empty(io, dtype=points[0].io_dtype, device=device)
        self._pool = self._normal(max(p.chunks * p.elements for p in points), points[0].state_dtype)

    def lap(self, point: GridPoint) -> list[DecodeCall]:
        """The calls of a point: slots in random order, none twice until all had their turn."""
        B = point.B
        q, k, v, out = self.tokens(point)
        decays = torch.logspace(-1.7, 0, point.H, device=self.device)
        pool = self.pool(point, point.chunks * point.elements)
        table = self.offsets(B, point.chunks)
        chunks = [n % point.chunks for n in range(point.calls)]
        return [DecodeCall(q, k, v, pool, table[n], decays, out, window=n * B) for n in chunks]

    def tokens(self, point: GridPoint) -> tuple[torch.Tensor, ...]:
        """q, k, v and out of a call of decode."""
        shape = point.B, point.H, SIZE
        return tuple(t[: math.prod(shape)].view(shape) for t in (self._q, self._k, self._v, self._out))

    def pool(self, point: GridPoint, elements: int) -> torch.Tensor:
        """So many values of the pool as states [P*H, V, K], in the layout of a point."""
        pool = self._pool[:elements].view(-1, SIZE, SIZE)
        return pool.transpose(1, 2) if point.layout == "kv" else pool

    def offsets(self, B: int, chunks: int) -> torch.Tensor:
        """All slots of so many chunks in random order, [chunks, B]."""
        order = torch.randperm(chunks * B, generator=self._random).int().view(chunks, B)
        # Rows of a multiple of 16 bytes: some kernels take no other offsets.
        table = torch.zeros(chunks, -(-B // 4) * 4, dtype=torch.int32, device=self.device)
        table[:, :B] = order.to(self.device)
        return table[:, :B]

    def _normal(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Random numbers of order 1; beyond `PERIOD` of them they repeat."""
        some = torch.randn(min(size, PERIOD), generator=self._random).to(self.device, dtype)
        values = torch.empty(size, dtype=dtype, device=self.device)
        for part in torch.split(values, PERIOD):
            part.copy_(some[: part.numel()])
        return values


class GridSubject(Subject):
    """One point: judged on the very tensors that are timed."""

    def __init__(self, point: GridPoint, tensors: GridTensors) -> None:
        self.point, self._tensors = point, tensors
        self.name = point.name
        self.problem = point.problem()
        self.bytes_per_call = float(self.problem.bytes_moved())
        self.padded = False
        self._lap: list[DecodeCall] = []
        self._before = torch.empty(0)
        self._truths: dict[str, DecodeTruth] = {}

    def start_judging(self) -> None:
        """See :class:`Subject`."""
        self._lap = self._tensors.lap(self.point)
        self._before = self._lap[0].s.clone()
        B = self.point.B
        self._rows = sorted({n * (B - 1) // max(1, JUDGED_ROWS - 1) for n in range(JUDGED_ROWS)})

    def first_problem(self) -> DecodeProblem:
        """The facts of the calls on the device, from their tensors."""
        call = self._lap[0]
        return decode_problem(call.q, call.k, call.v, call.s, call.s_offsets, call.decay_scales, call.out)

    def judge(self, variant: Variant) -> Verdict:
        """Make one call and compare sampled rows with float64, and every slot it does not name bit for bit."""
        call = self._lap[-1].in_layout(variant.layout(self.point.layout))
        truth = self._truth(call)
        call.out.fill_(torch.nan)
        states = call.s.unflatten(0, (-1, self.point.H))  # type: ignore[no-untyped-call]
        named = call.s_offsets[self._rows].long()
        before = states[named].flatten(0, 1)
        try:
            out = variant.run(call)[self._rows]
            faults = self._changed_slots(call)
            if variant.facts.kind == "floor":
                wrong, error = floor_faults(before, states[named].flatten(0, 1))
                return Verdict((*wrong, *faults), None, error)
            allowed = allowed_truth(variant, truth, call.q.dtype, SIZE)
            wrong = (
                *out_errors(out, allowed, call.decay_scales, SIZE),
                *state_errors(call.s, call.s_offsets[self._rows], allowed, call.decay_scales),
            )
            error = worst_state_error(call.s, call.s_offsets[self._rows], truth)
            return Verdict((*wrong, *faults), worst_out_error(out, truth), error)
        finally:
            self._lap[0].s.copy_(self._before)

    def calls(self) -> SubjectCalls:
        """See :class:`Subject`."""
        self._before = torch.empty(0)
        self._truths = {}
        host = range(len(self._lap)) if self.point.state_bytes <= HOST_BYTES else ()
        return SubjectCalls(self._lap, min(4, len(self._lap)), 0, host)

    def facts(self) -> WorkloadFacts:
        """See :class:`Subject`."""
        point, problem = self.point, self.problem
        return WorkloadFacts(
            name=self.name,
            description=f"H = {point.H}, B = {point.B}, full batches, slots in random order",
            model=f"H = {point.H}",
            load=f"B{point.B}",
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
            live_rows=[point.B],
            padded_rows=[point.B],
            slopes="0.02 to 1",
            linear_layers=0,
            layers_timed=[],
            bytes_per_call=self.bytes_per_call,
            reuse_bytes=(point.chunks - 1) * point.state_bytes,
            grid=True,
        )

    def _truth(self, call: DecodeCall) -> DecodeTruth:
        """The truth of the judged rows in the call's layout, which decides what the states are."""
        if call.layout not in self._truths:
            rows = self._rows
            self._truths[call.layout] = decode_truth(
                call.q[rows], call.k[rows], call.v[rows], call.s, call.s_offsets[rows], call.decay_scales
            )
        return self._truths[call.layout]

    def _changed_slots(self, call: DecodeCall) -> tuple[str, ...]:
        """A sentence if a slot changed that the call does not name."""
        changed = _changed(self._lap[0].s, self._before, self.point.H)
        changed[call.s_offsets.long()] = False
        wrong = changed.nonzero().flatten().tolist()
        if not wrong:
            return ()
        return (f"{len(wrong)} slots outside of the named ones changed, the first is {wrong[0]}",)


def run_grid(
    points: Sequence[GridPoint],
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
    tensors = GridTensors(points, device, environment.seed)
    names = [variant.name for variant in variants]
    costs = [estimate_seconds(point, names, effort) for point in points]
    subjects = [GridSubject(point, tensors) for point in points]
    return compare_subjects(subjects, variants, device, environment, effort, costs, say=say, tick=tick, keep=keep)


def _changed(first: torch.Tensor, second: torch.Tensor, heads: int) -> torch.Tensor:
    """Whether a slot of two pools [P*H, V, K] holds different bits, for each slot."""
    integer = {2: torch.int16, 4: torch.int32}[first.element_size()]
    dense = [pool if pool.stride(2) == 1 else pool.transpose(1, 2) for pool in (first, second)]
    slots = [pool.view(integer).view(-1, heads * SIZE * SIZE) for pool in dense]
    size = max(1, PIECE // slots[0].shape[1])
    pieces = zip(*(torch.split(pool, size) for pool in slots), strict=True)
    return torch.cat([(one != other).any(dim=1) for one, other in pieces])
