"""What the operators cost from Python: all of their checks and choices, around a backend that does nothing."""

from __future__ import annotations

import importlib
import sys
import tempfile
import timeit
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from la_bench.timing import Spread, Tick, spread
from la_core import KVWindow, advance, clear, commit, decode, fold, use_backend, verify
from la_core.backends.discover_backends import ENTRY_POINT_GROUP, forget_backends

H, SIZE, POOL_SLOTS = 8, 128, 96
PLACES, DRAFTS = 16, 4
OPERATORS = {one.__name__: one for one in (decode, verify, advance, clear, fold, commit)}
CALLS_PER_SAMPLE = 240
SETS = 6
"""Sets of tensors that the rotating variant walks through; divides `CALLS_PER_SAMPLE`."""


@dataclass(frozen=True)
class HostVariant:
    """One way to call: a statement, the names it uses, and how many calls one execution makes.

    `main` marks the figures that a limit applies to.
    """

    name: str
    statement: str
    names: dict[str, Any]
    calls: int = 1
    main: bool = False
    inference: bool = False


@dataclass(frozen=True)
class HostCost:
    """Microseconds per call, and the median's ratio to `torch.add`."""

    name: str
    time_us: Spread
    ratio: float
    main: bool


BASELINE = "torch.add(x, x) of one element"


@contextmanager
def installed_backend(name: str, target: str) -> Iterator[None]:
    """Install a backend for the time of the block, in a way that la-core's own discovery finds.

    Parameters
    ----------
    name
        Name of the entry point, which must be the backend's name.
    target
        Where the object is, as `module:attribute`.
    """
    with tempfile.TemporaryDirectory(prefix="la-bench-") as folder:
        info = Path(folder, f"la_bench_{name.replace('-', '_')}-0.0.0.dist-info")
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: la-bench-{name}\nVersion: 0.0.0\n")
        (info / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\n{name} = {target}\n")
        sys.path.append(folder)
        _look_again()
        try:
            yield
        finally:
            sys.path.remove(folder)
            _look_again()


def host_variants() -> list[HostVariant]:
    """Every way to call that is measured. K = V = 128, H = 8, bf16 q, k and v, float32 states, values checked."""
    pool = torch.zeros(POOL_SLOTS * H, SIZE, SIZE)
    slopes = torch.rand(H) + 0.1
    one = _arguments(1, pool, slopes)
    four = _arguments(4, pool, slopes)
    many = _arguments(64, pool, slopes)
    arguments = "q, k, v, s, s_offsets, decay_scales"
    given, allocated = f"decode({arguments}, out=out)", f"decode({arguments})"
    explicit = f"decode({arguments}, out=out, backend='do-nothing', softmax_scale=0.5)"
    rotating = f"for q, k, v, s, s_offsets, decay_scales, out in sets: {given}"
    sets = [tuple(_arguments(4, pool, slopes, seed=n).values()) for n in range(SETS)]
    sizes = [tuple(_arguments(rows, pool, slopes, seed=rows).values()) for rows in (1, 2, 4, 8, 16, 24)]
    return [
        HostVariant("B = 1, out given", given, one, main=True),
        HostVariant("B = 1, out allocated", allocated, one, main=True),
        HostVariant("B = 4, out given", given, four, main=True),
        HostVariant("B = 4, out allocated", allocated, four, main=True),
        HostVariant("B = 64, out given", given, many),
        HostVariant("B = 64, out allocated", allocated, many),
        HostVariant("B = 4, out given, q, k, v slices of a fused qkv", given, _fused(4, pool, slopes)),
        HostVariant("B = 4, out given, backend and scale given", explicit, four),
        HostVariant("B = 4, out given, inference_mode", given, four, inference=True),
        HostVariant("B = 4, out allocated, inference_mode", allocated, four, inference=True),
        HostVariant(f"B = 4, out given, {SETS} sets of tensors in turn", rotating, {"sets": sets}, calls=SETS),
        HostVariant("B = 1, 2, 4, 8, 16, 24 in turn, out given", rotating, {"sets": sizes}, calls=len(sizes)),
        *_window_variants(four),
    ]


def measure_host(samples: int, tick: Tick = lambda done: None) -> list[HostCost]:
    """The baseline first, then every variant; samples of a few hundred calls are interleaved.

    Operators with a window come behind those without: the first call after theirs would find colder caches.
    """
    x = torch.zeros(1)
    variants = [HostVariant(BASELINE, "add(x, x)", {"add": torch.add, "x": x}), *host_variants()]
    timers = [timeit.Timer(v.statement, globals={**OPERATORS, **v.names}).timeit for v in variants]
    taken: list[list[float]] = [[] for _ in variants]
    with installed_backend("do-nothing", "la_bench.do_nothing_backend:backend"), use_backend("do-nothing"):
        measured = list(zip(variants, timers, taken, strict=True))
        groups = [[one for one in measured if ("window" in one[0].names) == windows] for windows in (False, True)]
        for done, group in enumerate(groups):
            for number in range(-1, samples):
                for variant, timer, mine in group:
                    seconds = _sample(variant, timer)
                    if number >= 0:  # the first round makes plans and warms up
                        mine.append(seconds / CALLS_PER_SAMPLE * 1e6)
                tick((done + (number + 1) / samples) / len(groups))
    baseline = spread(taken[0]).median
    return [
        HostCost(v.name, spread(mine), spread(mine).median / baseline, v.main)
        for v, mine in zip(variants, taken, strict=True)
    ]


def over_limit(costs: Sequence[HostCost], max_ratio: float) -> list[HostCost]:
    """The main figures whose ratio exceeds the limit."""
    return [cost for cost in costs if cost.main and cost.ratio > max_ratio]


def _sample(variant: HostVariant, timer: Callable[[int], float]) -> float:
    with torch.inference_mode(variant.inference):
        return timer(CALLS_PER_SAMPLE // variant.calls)


def _arguments(rows: int, pool: torch.Tensor, slopes: torch.Tensor, seed: int = 0) -> dict[str, Any]:
    """Arguments of a call under their own names, `out` last; offsets are distinct and in no order."""
    random = torch.Generator().manual_seed(seed)
    shape = (rows, H, SIZE)
    q, k, v = (torch.randn(shape, generator=random).bfloat16() for _ in range(3))
    s_offsets = torch.randperm(POOL_SLOTS, generator=random)[:rows].int()
    out = torch.empty(shape, dtype=torch.bfloat16)
    return {"q": q, "k": k, "v": v, "s": pool, "s_offsets": s_offsets, "decay_scales": slopes, "out": out}


def _window_variants(one: dict[str, Any]) -> list[HostVariant]:
    """The operators with a window, B = 4, on the pool and the slots of a call of decode."""
    rows = len(one["s_offsets"])
    window = KVWindow.allocate(P=POOL_SLOTS, N=PLACES, H=H, K=SIZE, V=SIZE)
    drafts = [torch.zeros(rows, DRAFTS, H, SIZE, dtype=torch.bfloat16) for _ in "qkvo"]
    names = {**one, "window": window, "accepted": torch.ones(rows, dtype=torch.int32)}
    tokens = {**names, **dict(zip(("q", "k", "v", "out"), drafts, strict=True))}
    pool = "s, s_offsets, decay_scales"
    return [
        HostVariant("B = 4, with a window, out given", f"decode(q, k, v, {pool}, window=window, out=out)", names),
        HostVariant(f"B = 4, verify, T = {DRAFTS}, out given", f"verify(q, k, v, {pool}, window, out=out)", tokens),
        HostVariant("B = 4, advance", "advance(window, s_offsets)", names),
        HostVariant("B = 4, advance with room", f"advance(window, s_offsets, accepted, room={DRAFTS})", names),
        HostVariant("B = 4, commit with room", f"commit(window, {pool}, accepted, room={DRAFTS})", names),
        HostVariant("B = 4, fold", f"fold(window, {pool})", names),
    ]


def _fused(rows: int, pool: torch.Tensor, slopes: torch.Tensor) -> dict[str, Any]:
    fused = torch.randn(rows, 3, H, SIZE).bfloat16()
    q, k, v = fused.unbind(1)
    return {**_arguments(rows, pool, slopes), "q": q, "k": k, "v": v}


def _look_again() -> None:
    importlib.invalidate_caches()
    forget_backends()
