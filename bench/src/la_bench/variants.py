"""What can be timed side by side: our backends, with and without overlap, the in-place floor, and peers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from la_bench.errors import UsageError
from la_bench.kernel_watch import KernelWatch, kernel_counter
from la_bench.peers import load_peer
from la_bench.peers.peer import Peer, PeerRefusal, PeerUnavailable, as_slots
from la_bench.rows import BackendFacts
from la_bench.tensors import DecodeCall
from la_bench.tile_words import chosen_tiles
from la_bench.timing import Bound, Lap
from la_bench.version import __version__
from la_core import BackendUnavailable, DecodeProblem, decode, decode_problem, list_backends, use_overlap
from la_core.backends.discover_backends import KNOWN_NAMES, installed_names, load_backend
from la_core.conformance.source_hash import source_hash
from la_core.spec.decode_problem import StateLayout

if TYPE_CHECKING:
    from la_bench.gpu_timing import GraphTimer

BASELINE = "ref"
"""The backend that speed-ups are relative to."""

FLOOR = "in-place floor"
OWN = f"la-bench {__version__}"
"""Distribution of what is measured here and is no backend's or peer's."""

OVERLAP = "+overlap"
OVERLAP_ARCH = (9, 0)
"""Programmatic dependent launch came with it."""


class Variant(ABC):
    """One way to make a call.

    Attributes
    ----------
    facts
        Its name, kind and origin, as rows hold them.
    untimed
        Why it is judged and not timed; None if it is timed.
    watch
        Counts the kernels that are made for the present subject; None where nobody can tell.
    places
        Of the window that it uses; None without one.
    way_in_words
        What it does, where that is not a call of decode.
    """

    facts: BackendFacts
    untimed: str | None = None
    watch: KernelWatch | None = None
    places: int | None = None
    way_in_words: str | None = None

    @property
    def name(self) -> str:
        """As in rows and reports."""
        return self.facts.name

    def layout(self, wanted: StateLayout) -> StateLayout:
        """The layout it runs with where `wanted` is asked for."""
        return wanted

    def start(self) -> None:
        """Begin with a new subject."""
        return

    def check(self, problem: DecodeProblem, *, padded: bool) -> None:
        """Raise why the variant cannot make a call; `padded` says whether some offsets are negative."""
        return

    def prepare(self, calls: Sequence[DecodeCall], timer: GraphTimer) -> None:
        """Choose what has to be measured first, on a GPU."""
        return

    def tiles(self, call: DecodeCall) -> str | None:
        """The tiles that a call runs with, in words; None if nobody can tell."""
        return None

    def close(self) -> None:
        """Give back what it holds; it can still be asked again."""
        return

    def inside(self) -> AbstractContextManager[None]:
        """The context that calls run in."""
        return use_overlap(True) if self.facts.overlap else nullcontext()

    @abstractmethod
    def bind(self, call: DecodeCall) -> Bound:
        """The call, ready to be made again and again."""

    @abstractmethod
    def run(self, call: DecodeCall) -> torch.Tensor:
        """Make the call for the gate: states in the pool, output in `call.out`, whatever the variant does itself."""

    def lap(self, calls: Sequence[DecodeCall], distinct: int) -> Lap:
        """The calls, bound, in the layout of the variant."""
        return Lap([self.bind(call.in_layout(self.layout(call.layout))) for call in calls], distinct, self.inside)


class BackendVariant(Variant):
    """`la_core.decode` with all of its checks, on one backend."""

    def __init__(self, backend: str, *, overlap: bool = False) -> None:
        self.backend = backend
        facts = backend_facts(backend)
        self.facts = replace(facts, name=backend + OVERLAP, overlap=True) if overlap else facts

    def start(self) -> None:
        """Watch for kernels that are made, if the backend says how many there are."""
        counter = kernel_counter(self._package())
        self.watch = None if counter is None else KernelWatch(counter)

    def bind(self, call: DecodeCall) -> Bound:
        """See :class:`Variant`."""
        tensors = (call.q, call.k, call.v, call.s, call.s_offsets, call.decay_scales)
        return partial(decode, *tensors, out=call.out, backend=self.backend)

    def tiles(self, call: DecodeCall) -> str | None:
        """What the backend's `choose_decode_tiles` says, if it has one."""
        problem = decode_problem(call.q, call.k, call.v, call.s, call.s_offsets, call.decay_scales, call.out)
        return chosen_tiles(self._package(), replace(problem, overlap=self.facts.overlap))

    def run(self, call: DecodeCall) -> torch.Tensor:
        """See :class:`Variant`."""
        bound = self.bind(call)
        with self.inside(), self.watch.call() if self.watch else nullcontext():
            out = bound()
        assert isinstance(out, torch.Tensor)
        return out

    def _package(self) -> str:
        return type(load_backend(self.backend)).__module__.partition(".")[0]


class FloorVariant(Variant):
    """A kernel that multiplies the states in place and does nothing else. On CUDA devices only."""

    def __init__(self, *, overlap: bool = False) -> None:
        from la_bench import inplace_floor

        self._floor = inplace_floor
        name = FLOOR + OVERLAP if overlap else FLOOR
        note = "Multiplies the same states through the same slots and does nothing else; best of its tiles."
        self.facts = BackendFacts(name, OWN, source_hash("la_bench"), "floor", overlap, note)
        self._tiles = inplace_floor.TILES[0]

    def check(self, problem: DecodeProblem, *, padded: bool) -> None:
        """See :class:`Variant`."""
        reason = self._floor.refusal(problem)
        if reason:
            raise PeerRefusal(f"the in-place floor {reason}")

    def prepare(self, calls: Sequence[DecodeCall], timer: GraphTimer) -> None:
        """Measure all tiles and keep the best."""
        bound = {tiles: [self._bind(call, tiles) for call in calls] for tiles in self._floor.TILES}
        laps = {str(tiles): Lap(lap, 1) for tiles, lap in bound.items()}
        medians = timer.compare(laps, rounds=5).medians()
        if not medians:
            raise RuntimeError("no tile of the in-place floor could be run")
        best = min(medians, key=lambda name: medians[name])
        self._tiles = next(tiles for tiles in bound if str(tiles) == best)

    def tiles(self, call: DecodeCall) -> str | None:
        """The best that were measured."""
        return str(self._tiles)

    def bind(self, call: DecodeCall) -> Bound:
        """See :class:`Variant`."""
        return self._bind(call, self._tiles)

    def run(self, call: DecodeCall) -> torch.Tensor:
        """See :class:`Variant`."""
        self.bind(call)()
        return call.out

    def _bind(self, call: DecodeCall, tiles: object) -> Bound:
        assert isinstance(tiles, self._floor.FloorTiles)
        call = call.for_floor()
        return self._floor.bind_floor(call.s, call.s_offsets, call.decay_scales.shape[0], tiles, self.facts.overlap)


class PeerVariant(Variant):
    """A public kernel of others, or the reason why it is not here."""

    def __init__(self, name: str, path: Path | None) -> None:
        self.peer: Peer | PeerUnavailable = load_peer(name, path)
        if isinstance(self.peer, Peer):
            origin = self.peer.file.name if self.peer.file else OWN
            self.facts = BackendFacts(name, origin, self.peer.source_hash(), "peer", False, self.peer.differs)
        else:
            self.facts = BackendFacts(name, None, None, "peer", False, None)

    def _here(self) -> Peer:
        if isinstance(self.peer, PeerUnavailable):
            raise self.peer
        return self.peer

    def layout(self, wanted: StateLayout) -> StateLayout:
        """See :class:`Variant`."""
        return self.peer.layout(wanted) if isinstance(self.peer, Peer) else wanted

    def check(self, problem: DecodeProblem, *, padded: bool) -> None:
        """See :class:`Variant`."""
        peer = self._here()
        reason = peer.refusal(problem, padded=padded)
        if reason is None and not peer.pooled and problem.B > problem.P:
            reason = "knows no slots and needs as many of them as rows"
        if reason:
            raise PeerRefusal(f"{self.name} {reason}")

    def bind(self, call: DecodeCall) -> Bound:
        """See :class:`Variant`."""
        peer = self._here()
        return peer.bind(call if peer.pooled else call.without_pool())

    def run(self, call: DecodeCall) -> torch.Tensor:
        """See :class:`Variant`."""
        peer = self._here()
        if peer.pooled:
            returned = peer.bind(call)()
            out, _ = peer.results(returned, call)
        else:
            out = _run_without_pool(peer, call)
        if out is not call.out:
            call.out.copy_(out)
        call.out[call.s_offsets < 0] = 0
        return call.out


def _run_without_pool(peer: Peer, call: DecodeCall) -> torch.Tensor:
    """Gather the states of the rows, make the call, and scatter those of live rows."""
    heads = call.decay_scales.shape[0]
    pool = as_slots(call.s, heads, call.layout)
    states = pool[call.s_offsets.clamp_min(0).long()].flatten(0, 1)
    call = replace(call, s=states if call.layout == "vk" else states.transpose(1, 2))
    out, new = peer.results(peer.bind(call)(), call)
    # Logical shapes on both sides: pool and new states may lie differently.
    pool = pool if call.layout == "vk" else pool.transpose(2, 3)
    new = (call.s if new is None else new).reshape(len(call.q), heads, *call.s.shape[1:])
    live = call.s_offsets >= 0
    pool[call.s_offsets[live].long()] = new[live].to(pool.dtype)
    return out


def backend_variants(backends: Sequence[str], arch: tuple[int, int] | None) -> list[Variant]:
    """Each backend, and with overlap where the device can and the backend is not the baseline, which has none.

    Without a GPU (`arch` None) those that have an interpreter are judged under it.
    """
    from la_bench.interpreter import INTERPRETERS, InterpretedVariant

    variants: list[Variant] = []
    for name in backends:
        loaded = backend_facts(name).source_hash is not None
        interpreted = arch is None and loaded and name in INTERPRETERS
        variants.append(InterpretedVariant(name) if interpreted else BackendVariant(name))
        if arch is not None and arch >= OVERLAP_ARCH and name != BASELINE and loaded:
            variants.append(BackendVariant(name, overlap=True))
    return variants


def floor_variants(arch: tuple[int, int] | None) -> list[Variant]:
    """The floor, and with overlap where the device can; none without a GPU."""
    if arch is None:
        return []
    overlaps = (False, True) if arch >= OVERLAP_ARCH else (False,)
    return [FloorVariant(overlap=overlap) for overlap in overlaps]


def peer_variants(names: Sequence[str], paths: Mapping[str, Path]) -> list[Variant]:
    """The peers, those that are not installed included.

    Raises
    ------
    UsageError
        A peer that was given a path cannot be loaded from it.
    """
    variants = [PeerVariant(name, paths.get(name)) for name in names]
    for variant in variants:
        if isinstance(variant.peer, PeerUnavailable) and variant.name in paths:
            raise UsageError(f"--peer {variant.name}={paths[variant.name]}: {variant.peer}.")
    return list(variants)


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


def backend_facts(name: str) -> BackendFacts:
    """Distribution and source of an installed backend, as far as they can be had."""
    distribution = next((info.distribution for info in list_backends() if info.name == name), None)
    try:
        return BackendFacts(name, distribution, source_hash(type(load_backend(name)).__module__))
    except BackendUnavailable:
        return BackendFacts(name, distribution, None)
