"""What is timed with a window: each variant is a list of calls of the operators, on one backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import la_core
from la_bench.grid import GridPoint
from la_bench.interpreter import INTERPRETERS, InterpretedVariant
from la_bench.tensors import DecodeCall
from la_bench.tile_words import chosen_tiles
from la_bench.timing import Bound, Lap
from la_bench.variants import (
    BASELINE,
    OVERLAP,
    OVERLAP_ARCH,
    BackendVariant,
    Variant,
    backend_facts,
    floor_variants,
)
from la_bench.window_calls import Group, WindowCall
from la_bench.window_spec import WindowSpec
from la_bench.window_traffic import commit_bytes, deferred_bytes, kept_bytes, once_bytes, verify_bytes
from la_core import KVWindow
from la_core.conformance.window_cases import WindowCase
from la_core.conformance.window_inputs import WindowInputs
from la_core.conformance.window_target import problem_of


class Way(ABC):
    """One way to do what an operator is for.

    Attributes
    ----------
    label
        What the name of a variant says behind the backend's.
    note
        What it does.
    window
        Name of the window that it works on; see :class:`WindowTensors`.
    places
        Of that window.
    phased
        Whether what it does depends on how full the window is.
    renews
        Whether other drafts are accepted in each sample.
    longest
        Most pending tokens that it is judged with.
    """

    label: str
    note: str
    window: str
    places: int
    phased = False
    renews = False

    @property
    def longest(self) -> int:
        """A full window, where nothing else is said."""
        return self.places

    @abstractmethod
    def actions(self, call: WindowCall, *, in_place: bool = False) -> list[WindowInputs]:
        """The calls of the operators, in order; with `in_place` all of them on the call's own group of slots, and only
        of the first and the last layer.
        """

    @abstractmethod
    def bytes_at(self, point: GridPoint) -> float:
        """Fewest bytes that a step of one layer moves."""

    def per_call(self, call: WindowCall) -> float:
        """Units, steps of a layer, in one call."""
        return float(call.layers)


class Deferred(Way):
    """decode with a window; cursors stay, as decode only reads them."""

    phased = True

    def __init__(self, places: int) -> None:
        self.label = self.window = f"window{places}"
        self.places = places
        self.note = (
            f"decode with a window of {places}: one call in {places + 1} of each slot finds its window full and writes "
            "the state. The launch of advance, one for all layers of a model, is not in the time."
        )

    def actions(self, call: WindowCall, *, in_place: bool = False) -> list[WindowInputs]:
        """See :class:`Way`."""
        return [_action("decode", call, self.window, call.here, layer=0, tokens=(call.q, call.k, call.v, call.out))]

    def bytes_at(self, point: GridPoint) -> float:
        """See :class:`Way`."""
        return deferred_bytes(point, self.places)


class Kept(Way):
    """verify and advance; the window stays, and is committed where it would have no room."""

    phased = renews = True

    def __init__(self, spec: WindowSpec, places: int) -> None:
        self.label = self.window = f"window{places}"
        self.places, self.drafts = places, spec.drafts
        self.note = (
            f"verify, commit of the slots that would have no room for {spec.drafts} more drafts, advance, with a "
            f"window of {places} places. " + layer_words(spec)
        )

    @property
    def longest(self) -> int:
        """See :class:`Way`."""
        return self.places - self.drafts

    def actions(self, call: WindowCall, *, in_place: bool = False) -> list[WindowInputs]:
        """See :class:`Way`."""
        ahead = call.here if in_place else call.ahead
        return [
            *_verifies(call, self.window, in_place),
            *_commits(call, self.window, ahead, self.drafts),
            _action("advance", call, self.window, ahead, counts=ahead.accepted, room=self.drafts),
        ]

    def bytes_at(self, point: GridPoint) -> float:
        """See :class:`Way`."""
        return kept_bytes(point, self.places, self.drafts)


class Verifies(Way):
    """verify alone, with room for all drafts."""

    phased = True

    def __init__(self, spec: WindowSpec) -> None:
        self.places, self.drafts = spec.places[0], spec.drafts
        self.label = self.window = f"window{self.places}"
        self.note = f"verify, with a window of {self.places} places."

    @property
    def longest(self) -> int:
        """See :class:`Way`."""
        return self.places - self.drafts

    def actions(self, call: WindowCall, *, in_place: bool = False) -> list[WindowInputs]:
        """See :class:`Way`."""
        return [_action("verify", call, self.window, call.here, layer=0, tokens=call.drafts)]

    def bytes_at(self, point: GridPoint) -> float:
        """See :class:`Way`."""
        return verify_bytes(point, self.places, self.drafts)


class Once(Way):
    """verify, and commit at once: no window between steps."""

    renews = True
    label, window = "commit", "once"

    def __init__(self, spec: WindowSpec) -> None:
        self.places = spec.drafts
        self.note = (
            f"verify, and commit of what is accepted, with a window of T = {spec.drafts} places that is empty between "
            "steps. " + layer_words(spec)
        )

    def actions(self, call: WindowCall, *, in_place: bool = False) -> list[WindowInputs]:
        """See :class:`Way`."""
        ahead = call.here if in_place else call.ahead
        return [*_verifies(call, self.window, in_place), *_commits(call, self.window, ahead, None)]

    def bytes_at(self, point: GridPoint) -> float:
        """See :class:`Way`."""
        return once_bytes(point, self.places)


class Commits(Way):
    """The three ways to bring tokens into the states of all layers: `commit_layers`, commits, folds."""

    def __init__(self, label: str, spec: WindowSpec) -> None:
        self.label, self.places, self.drafts = label, spec.places[0], spec.drafts
        self.window = "pending" if label == "fold" else f"window{self.places}"
        self.note = {
            "layers": f"commit_layers: one launch for {spec.layers} layers.",
            "commit": f"commit, {spec.layers} times, once for each layer.",
            "fold": f"fold, {spec.layers} times, with the same tokens pending that the others accept.",
        }[label]

    def actions(self, call: WindowCall, *, in_place: bool = False) -> list[WindowInputs]:
        """See :class:`Way`."""
        if self.label == "layers":
            return [_action("commit", call, self.window, call.here, counts=call.here.accepted)]
        op, counts = ("fold", None) if self.label == "fold" else ("commit", call.here.accepted)
        return [_action(op, call, self.window, call.here, layer=n, counts=counts) for n in _layers(call, in_place)]

    def bytes_at(self, point: GridPoint) -> float:
        """See :class:`Way`."""
        return commit_bytes(point, self.places, self.drafts)


def ways_of(spec: WindowSpec) -> list[Way]:
    """All ways that an operator is compared in."""
    if spec.op == "deferred":
        return [Deferred(places) for places in spec.places]
    if spec.op == "verify":
        return [*(Kept(spec, places) for places in spec.places), Once(spec)]
    return [Commits(label, spec) for label in ("layers", "commit", "fold")]


def layer_words(spec: WindowSpec) -> str:
    """How the launches that all layers share are counted."""
    if spec.layers == 1:
        return "What a model launches once for all of its layers is counted in full for one layer."
    return f"What follows verify is launched once for {spec.layers} layers, and the time is that of one layer."


class WayVariant(BackendVariant):
    """A way on a backend."""

    def __init__(self, backend: str, way: Way, *, overlap: bool = False) -> None:
        self.backend, self.way = backend, way
        name = f"{backend}+{way.label}{OVERLAP if overlap else ''}"
        self.facts = replace(backend_facts(backend), name=name, overlap=overlap)
        self.places, self.way_in_words = way.places, way.note

    def bind(self, call: DecodeCall) -> Bound:
        """See :class:`la_bench.variants.Variant`."""
        assert isinstance(call, WindowCall)
        made = [bind_action(action, self.backend) for action in self.way.actions(call)]
        return made[0] if len(made) == 1 else partial(_in_turn, made)

    def tiles(self, call: DecodeCall) -> str | None:
        """What the backend's `choose_window_tiles` says of the operators that have states, if it has one."""
        assert isinstance(call, WindowCall)
        known: dict[str, str] = {}
        for action in self.way.actions(call, in_place=True):
            problem = problem_of(action)
            if problem.op != "advance" and problem.op not in known:
                tiles = chosen_tiles(self._package(), replace(problem, overlap=self.facts.overlap))
                if tiles is not None:
                    known[problem.op] = tiles
        parts = [f"{op}: {tiles}" for op, tiles in known.items()] if len(known) > 1 else list(known.values())
        return "; ".join(parts) or None

    def run_action(self, action: WindowInputs) -> torch.Tensor | None:
        """Make one of the calls for the gate."""
        with self.inside():
            bound = bind_action(action, self.backend)
            if self.watch is None:
                return _output(bound())
            with self.watch.call():
                return _output(bound())

    def lap(self, calls: Sequence[DecodeCall], distinct: int) -> Lap:
        """See :class:`la_bench.variants.Variant`."""
        first = calls[0]
        assert isinstance(first, WindowCall)
        renew = first.redraw if self.way.renews else None
        return replace(super().lap(calls, distinct), per_call=self.way.per_call(first), renew=renew)


class InterpretedWay(WayVariant):
    """A way on a backend that is judged under its interpreter, and not timed."""

    def __init__(self, backend: str, way: Way, interpreted: InterpretedVariant) -> None:
        super().__init__(backend, way)
        self.untimed = interpreted.untimed
        self._interpreted = interpreted

    def start(self) -> None:
        """Kernels that are made in the other process are not counted here."""
        return

    def check(self, problem: la_core.DecodeProblem, *, padded: bool) -> None:
        """See :class:`la_bench.variants.Variant`."""
        self._interpreted.check(problem, padded=padded)

    def run_action(self, action: WindowInputs) -> torch.Tensor | None:
        """See :class:`WayVariant`."""
        self._interpreted.run_action(action)
        return action.out

    def close(self) -> None:
        """See :class:`la_bench.variants.Variant`."""
        self._interpreted.close()


class DecodesVariant(BackendVariant):
    """T calls of decode in place of one verification: a call of a lap is one token of every layer."""

    def __init__(self, backend: str, spec: WindowSpec) -> None:
        super().__init__(backend)
        self.drafts = spec.drafts
        self.way_in_words = f"{spec.drafts} calls of decode, each on cold states, as a model makes them token by token."

    def bind(self, call: DecodeCall) -> Bound:
        """See :class:`la_bench.variants.Variant`."""
        assert isinstance(call, WindowCall)
        layers = zip(call.pools, call.slopes, strict=True)
        made = [BackendVariant.bind(self, replace(call, s=s, decay_scales=slopes)) for s, slopes in layers]
        return made[0] if len(made) == 1 else partial(_in_turn, made)

    def lap(self, calls: Sequence[DecodeCall], distinct: int) -> Lap:
        """See :class:`la_bench.variants.Variant`."""
        first = calls[0]
        assert isinstance(first, WindowCall)
        return replace(super().lap(calls, distinct), per_call=len(first.pools) / self.drafts)

    def run(self, call: DecodeCall) -> torch.Tensor:
        """See :class:`la_bench.variants.Variant`."""
        assert isinstance(call, WindowCall)
        return super().run(replace(call, pools=call.pools[:1], slopes=call.slopes[:1]))


def rivals_of(variant: Variant, spec: WindowSpec) -> dict[str, str]:
    """By role, the names of the variants that a variant's time is set against, whether they are in the run or not."""
    if not isinstance(variant, WayVariant):
        return {}
    overlap = OVERLAP if variant.facts.overlap else ""
    base, label = variant.backend, variant.way.label
    if spec.op == "deferred":
        return {"recurrent": base + overlap}
    if spec.op == "verify":
        return {"decodes": base} | ({} if label == "commit" else {"commit": f"{base}+commit"})
    return {role: f"{base}+{role}" for role in ("commit", "fold") if label == "layers"}


def window_variants(backends: Sequence[str], spec: WindowSpec, arch: tuple[int, int] | None) -> list[Variant]:
    """Each backend in every way; recurrent decode and, for deferred, overlap and floors beside them.

    verify and commit have no overlap: within a step one kernel writes the states and cursors that the next one reads.
    """
    variants: list[Variant] = []
    for name in backends:
        interpreted = None
        if arch is None and name in INTERPRETERS and backend_facts(name).source_hash is not None:
            interpreted = InterpretedVariant(name)
        overlaps = [False]
        if spec.op == "deferred" and arch is not None and arch >= OVERLAP_ARCH and name != BASELINE:
            overlaps += [True] if backend_facts(name).source_hash is not None else []
        for way in ways_of(spec):
            if interpreted is not None:
                variants.append(InterpretedWay(name, way, interpreted))
            else:
                variants += [WayVariant(name, way, overlap=overlap) for overlap in overlaps]
        if spec.op == "deferred":
            variants += [interpreted] if interpreted else [BackendVariant(name, overlap=o) for o in overlaps]
        elif spec.op == "verify":
            variants.append(interpreted or DecodesVariant(name, spec))
    return variants + (floor_variants(arch) if spec.op == "deferred" else [])


def bind_action(action: WindowInputs, backend: str) -> Bound:
    """The call of the public function that an action stands for."""
    case, window, slots = action.case, action.window, action.s_offsets
    tokens = (action.q, action.k, action.v, action.s, slots, action.decay_scales)
    pool = (window, action.s, slots, action.decay_scales)
    if case.op == "decode":
        return partial(la_core.decode, *tokens, window=window, out=action.out, backend=backend)
    if case.op == "verify":
        return partial(la_core.verify, *tokens, window, out=action.out, backend=backend)
    if case.op == "fold":
        return partial(la_core.fold, *pool, room=case.room, backend=backend)
    if case.op == "clear":
        return partial(la_core.clear, window, slots, room=case.room, backend=backend)
    assert action.counts is not None
    if case.op == "advance":
        return partial(la_core.advance, window, slots, action.counts, room=case.room, backend=backend)
    commit = la_core.commit_layers if case.L else la_core.commit
    return partial(commit, *pool, accepted=action.counts, room=case.room, backend=backend)


def _action(
    op: Any,
    call: WindowCall,
    window: str,
    group: Group,
    *,
    layer: int | None = None,
    tokens: tuple[torch.Tensor, ...] = (),
    counts: torch.Tensor | None = None,
    room: int | None = None,
) -> WindowInputs:
    """A call of an operator; of all layers if none is named."""
    stacked: KVWindow = call.windows[window]
    held, _, N, H, size = stacked.k.shape
    B = len(group.s_offsets)
    its_window = stacked if layer is None else stacked.layer(layer)
    s, slopes = (call.pools, call.slopes) if layer is None else (call.pools[layer], call.slopes[layer])
    q, k, v, out = tokens or (*(call.q, call.k, call.v), None)
    case = WindowCase(
        op, B=B, P=len(stacked.start), N=N, H=H, K=size, V=size, T=q.shape[1] if op == "verify" else 1,
        L=held if layer is None and op == "commit" else 0, io_dtype=q.dtype, state_dtype=s.dtype, room=room,
        state_layout=call.layout,
    )  # fmt: skip
    return WindowInputs(case, q, k, v, s, group.s_offsets, slopes, its_window, counts, out, {})


def _layers(call: WindowCall, in_place: bool) -> list[int]:
    """The layers of a step; those that are held take turns. For the gate the first and the last of them."""
    held = len(call.pools)
    return sorted({0, held - 1}) if in_place else [n % held for n in range(call.layers)]


def _verifies(call: WindowCall, window: str, in_place: bool) -> list[WindowInputs]:
    layers = _layers(call, in_place)
    return [_action("verify", call, window, call.here, layer=n, tokens=call.drafts) for n in layers]


def _commits(call: WindowCall, window: str, group: Group, room: int | None) -> list[WindowInputs]:
    """`commit` of one layer, or `commit_layers` over those that are held, as often as they make all layers."""
    layer = 0 if call.layers == 1 else None
    action = _action("commit", call, window, group, layer=layer, counts=group.accepted, room=room)
    return [action] * (call.layers // len(call.pools))


def _in_turn(made: Sequence[Bound]) -> None:
    for one in made:
        one()


def _output(returned: object) -> torch.Tensor | None:
    assert returned is None or isinstance(returned, torch.Tensor)
    return returned
