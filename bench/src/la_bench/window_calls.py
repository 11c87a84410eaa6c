"""The tensors of calls with a window: groups of cold slots, cursors at random phases, drafts and what is accepted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from la_bench.grid import SIZE, GridPoint
from la_bench.run_grid import GridTensors
from la_bench.tensors import DecodeCall
from la_bench.window_spec import WindowSpec
from la_bench.window_traffic import steady_lengths
from la_core import KVWindow

TWO_PHASES = ("cuda",)
"""Devices on which the two halves of a step are half a lap apart, so that states are cold both times. That takes whole
laps: on a CPU, where a sample is a part of a lap, cursors would run out of room."""


@dataclass(frozen=True)
class Group:
    """The slots of a call [B], and how many drafts each accepts."""

    s_offsets: torch.Tensor
    accepted: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class WindowCall(DecodeCall):
    """A call of decode on a group of slots, and with it what the same slots need with a window.

    Attributes
    ----------
    pools, slopes
        The pools that are held, [layers, P*H, V, K], and their slopes; those of decode are the first.
    layers
        How many a step has; where more than are held, they take turns.
    windows
        By name, stacked like the pools: see :class:`WindowTensors`.
    drafts
        q, k, v and out, [B, T, H, 128]; for deferred those of decode are used.
    here, ahead
        The group, and that whose turn comes half a lap later, for what must find its states cold a second time.
    all_accepted, random
        Memory of the accepted drafts of all groups, and where they come from.
    yardstick
        A call of decode on a float32 pool, for the floor.
    """

    pools: torch.Tensor
    slopes: torch.Tensor
    layers: int
    windows: Mapping[str, KVWindow]
    drafts: tuple[torch.Tensor, ...]
    here: Group
    ahead: Group
    all_accepted: torch.Tensor
    random: torch.Generator
    yardstick: DecodeCall | None

    def for_floor(self) -> DecodeCall:
        """See :class:`DecodeCall`."""
        return self.yardstick or self

    def redraw(self) -> None:
        """Draw anew how many drafts are accepted, in all groups."""
        draw_accepted(self.all_accepted, self.drafts[0].shape[1], self.random)


class WindowTensors(GridTensors):
    """Memory that all points share; of windows, too.

    Windows by name: `window<N>` with phases as in a long run; of verify `once`, of T places and empty, for an engine
    that commits at once; of commit `window<N>`, empty, and `pending`, in which the accepted drafts are pending.
    """

    def __init__(self, points: Sequence[GridPoint], spec: WindowSpec, device: torch.device, seed: int) -> None:
        super().__init__(points, device, seed)
        self.spec = spec
        self._accepting = torch.Generator(device).manual_seed(seed)
        self.yardstick: GridTensors | None = None
        if spec.op == "deferred" and points[0].state_dtype is not torch.float32:
            floors = [replace(point, state_dtype=torch.float32) for point in points]
            self.yardstick = GridTensors(floors, device, seed)
        io, most = points[0].io_dtype, max(point.B * point.H for point in points) * spec.drafts * SIZE
        self._drafts = [self._normal(most, io) for _ in range(4)] if spec.op == "verify" else []
        self._windows = {}
        for name, places in self._sizes().items():
            size = max(self.held(point)[0] * self.held(point)[1] * point.B * point.H for point in points)
            self._windows[name] = tuple(self._normal(size * places * SIZE, io) for _ in "kv")

    def lap(self, point: GridPoint) -> list[DecodeCall]:
        """The calls of a point: groups of slots in random order, none twice until all had their turn."""
        B, H, spec = point.B, point.H, self.spec
        held, groups = self.held(point)
        slots = groups * B
        flat = self.pool(point, held * groups * point.elements)
        pools = torch.unflatten(flat, 0, (held, slots * H))
        # Layers differ in their slopes.
        slopes = torch.logspace(-1.7, 0, H, device=self.device) * (1 + torch.arange(held, device=self.device)[:, None])
        table = self.offsets(B, groups)
        accepted = torch.zeros(groups, -(-B // 4) * 4, dtype=torch.int32, device=self.device)[:, :B]
        draw_accepted(accepted, spec.drafts, self._accepting)
        windows = self._all_windows(point, held, slots, table, accepted)
        shape = B, spec.drafts, H, SIZE
        drafts = tuple(t[: math.prod(shape)].view(shape) for t in self._drafts)
        yardsticks = self.yardstick_lap(point)
        parts = [Group(table[n], accepted[n]) for n in range(groups)]
        q, k, v, out = self.tokens(point)
        half = groups // 2 if self.device.type in TWO_PHASES else 0
        calls = max(groups, point.calls) if spec.op == "deferred" else groups
        return [
            WindowCall(
                *(q, k, v, pools[0], part.s_offsets, slopes[0], out),
                window=(n % groups) * B,
                pools=pools,
                slopes=slopes,
                layers=spec.layers,
                windows=windows,
                drafts=drafts,
                here=part,
                ahead=parts[(n + half) % groups],
                all_accepted=accepted,
                random=self._accepting,
                yardstick=yardsticks[n % len(yardsticks)] if yardsticks else None,
            )
            for n, part in ((n, parts[n % groups]) for n in range(calls))
        ]

    def yardstick_lap(self, point: GridPoint) -> list[DecodeCall]:
        """Calls of the floor, if they are on a pool of their own."""
        if self.yardstick is None:
            return []
        return self.yardstick.lap(replace(point, state_dtype=torch.float32))

    def buffers(self) -> dict[str, torch.Tensor]:
        """The memory of states by its name in a verdict."""
        return {"s": self._pool}

    def window_buffers(self, name: str) -> dict[str, torch.Tensor]:
        """The memory of a window's k and v by their names in a verdict."""
        k, v = self._windows[memory_of(name, self.spec)]
        return {"window_k": k, "window_v": v}

    def _sizes(self) -> dict[str, int]:
        """Places of each window that has memory of its own."""
        sizes = {f"window{places}": places for places in self.spec.places}
        return {**sizes, "once": self.spec.drafts} if self.spec.op == "verify" else sizes

    def held(self, point: GridPoint) -> tuple[int, int]:
        """Layers that are held, and groups of slots of each."""
        held = held_layers(point, self.spec)
        return held, max(1, point.chunks // held)

    def _all_windows(
        self, point: GridPoint, held: int, slots: int, table: torch.Tensor, accepted: torch.Tensor
    ) -> dict[str, KVWindow]:
        windows = {}
        for name, places in self._sizes().items():
            shape = held, slots, places, point.H, SIZE
            k, v = (memory[: math.prod(shape)].view(shape) for memory in self._windows[name])
            length = self._lengths(name, slots, places)
            windows[name] = KVWindow(k, v, *(self._cursor(c) for c in (self._below(places, slots), length)))
        if self.spec.op == "commit":
            empty = windows[f"window{self.spec.places[0]}"]
            length = torch.zeros_like(empty.length)
            length[table.flatten().long()] = accepted.flatten()
            windows["pending"] = KVWindow(empty.k, empty.v, empty.start, length)
        return windows

    def _lengths(self, name: str, slots: int, places: int) -> torch.Tensor:
        """Pending tokens of each slot."""
        if self.spec.op == "deferred":
            # Each length from 0 to N as often as every other one, in random order.
            return (torch.arange(slots) % (places + 1))[torch.randperm(slots, generator=self._random)]
        if self.spec.op == "commit" or name == "once":
            return torch.zeros(slots)
        shares = torch.tensor(steady_lengths(places, self.spec.drafts))
        return torch.multinomial(shares, slots, replacement=True, generator=self._random)

    def _below(self, limit: int, count: int) -> torch.Tensor:
        return torch.randint(0, limit, (count,), generator=self._random)

    def _cursor(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(self.device, torch.int32)


def memory_of(name: str, spec: WindowSpec) -> str:
    """Name of the window whose k and v a window has."""
    return f"window{spec.places[0]}" if name == "pending" else name


def held_layers(point: GridPoint, spec: WindowSpec) -> int:
    """Layers with a pool of their own: all that a step has, or as large a part of them as two groups of slots fit."""
    if spec.op == "commit":
        return spec.layers
    return max(n for n in range(1, spec.layers + 1) if spec.layers % n == 0 and n <= max(1, point.chunks // 2))


def draw_accepted(accepted: torch.Tensor, drafts: int, random: torch.Generator) -> None:
    """Uniform over 1 to T: the first token of a verification is known to be right, it was sampled before."""
    accepted.random_(1, drafts + 1, generator=random)
