"""What la-ref costs on a CPU, against `s.mul_(a)`: the least that plain torch can do to the same states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

import torch

from la_bench.timing import Spread, Tick, part_of, spread
from la_core import decode
from la_ref.blocks import BLOCK_BYTES

B, H, SIZE = 64, 16, 128
COLD_BATCHES = 11
"""Batches of slots in the cold pool, 64 MiB of states each. A prime, so that whatever takes turns meets them all."""

IN_TURN = "in turn: one pool of 64 slots"
"""The arrangement that a limit applies to."""

BLOCK_SIZES = tuple(mebi << 20 for mebi in (1, 2, 4, 8, 16))


@dataclass(frozen=True)
class RefCost:
    """Times in milliseconds of one arrangement, and the ratio of the medians."""

    arrangement: str
    decode_ms: Spread
    mul_ms: Spread

    @property
    def ratio(self) -> float:
        """Decode over `mul_`."""
        return self.decode_ms.median / self.mul_ms.median


class _States:
    """A pool of `batches` times B slots, and calls that touch one batch of them."""

    def __init__(self, batches: int, seed: int = 0) -> None:
        random = torch.Generator().manual_seed(seed)
        self.batches = batches
        self.pool = torch.randn(1, H, SIZE, SIZE, generator=random).repeat(batches * B, 1, 1, 1).view(-1, SIZE, SIZE)
        self.slopes = torch.rand(H, generator=random) + 0.1
        self.q, self.k, self.v = (torch.randn(B, H, SIZE, generator=random).bfloat16() for _ in range(3))
        self.out = torch.empty_like(self.v)
        self.offsets = [(n * B + torch.randperm(B, generator=random)).int() for n in range(batches)]

    def decode(self, batch: int) -> None:
        n = batch % self.batches
        decode(self.q, self.k, self.v, self.pool, self.offsets[n], self.slopes, out=self.out, backend="ref")

    def mul(self, batch: int) -> None:
        n = batch % self.batches
        self.pool[n * B * H : (n + 1) * B * H].mul_(0.999)


def measure_ref(rounds: int, tick: Tick = lambda done: None) -> list[RefCost]:
    """Decode and `mul_` over the same states, in three arrangements: in turn over cold states, in turn over one pool of
    64 slots, and each in a loop of its own over that pool, where `mul_` finds most of it in the cache.
    """
    cold, one_pool = _States(COLD_BATCHES), _States(1)
    taken = _interleave({"decode": cold.decode, "mul": cold.mul}, rounds, part_of(tick, 0, 3))
    costs = [RefCost(f"in turn, cold: {COLD_BATCHES} batches of slots", taken["decode"], taken["mul"])]
    both = {"decode": one_pool.decode, "mul": one_pool.mul}
    taken = _interleave(both, rounds, part_of(tick, 1, 3))
    costs.append(RefCost(IN_TURN, taken["decode"], taken["mul"]))
    taken = {}
    for name, run in both.items():
        taken |= _interleave({name: run}, rounds, part_of(tick, 2, 3))
    costs.append(RefCost("each in a loop: one pool of 64 slots", taken["decode"], taken["mul"]))
    return costs


def measure_blocks(rounds: int, tick: Tick = lambda done: None) -> list[RefCost]:
    """Decode with la-ref's block size set to each of `BLOCK_SIZES` in turn, over cold states."""
    states = _States(COLD_BATCHES)

    def with_block(size: int) -> Callable[[int], None]:
        def work(batch: int) -> None:
            with _block_bytes(size):
                states.decode(batch)

        return work

    work: dict[str, Callable[[int], None]] = {f"blocks of {size >> 20} MiB": with_block(size) for size in BLOCK_SIZES}
    taken = _interleave({**work, "mul": states.mul}, rounds, tick)
    return [RefCost(name, taken[name], taken["mul"]) for name in work]


def _interleave(work: Mapping[str, Callable[[int], None]], rounds: int, tick: Tick) -> dict[str, Spread]:
    """Milliseconds of each work; each takes the next batch of slots once a round, after two rounds unmeasured."""
    taken: dict[str, list[float]] = {name: [] for name in work}
    batch = 0
    for number in range(-2, rounds):
        for name, run in work.items():
            start = perf_counter()
            run(batch)
            seconds = perf_counter() - start
            if number >= 0:
                taken[name].append(seconds * 1e3)
            batch += 1
        tick(max(0, number + 1) / rounds)
    return {name: spread(samples) for name, samples in taken.items()}


@contextmanager
def _block_bytes(size: int) -> Iterator[None]:
    usual = BLOCK_BYTES["cpu"]
    BLOCK_BYTES["cpu"] = size
    try:
        yield
    finally:
        BLOCK_BYTES["cpu"] = usual
