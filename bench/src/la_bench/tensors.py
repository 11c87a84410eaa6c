"""The tensors of a workload: batches as slices of a fused qkv, and one state pool for each timed layer."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from la_bench.workloads import Workload
from la_core.spec.decode_problem import StateLayout

ARENA_BYTES = {"cpu": 640 << 20, "cuda": 12 << 30}
"""Memory that the pools of a workload share. CPU: 20 times a usual last-level cache, and kind to small machines."""


@dataclass(frozen=True)
class DecodeCall:
    """The arguments of one call, and what callers without a slot table need.

    Attributes
    ----------
    window
        First of as many neighbouring slots as there are rows: the states of a call that knows no slots.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    s: torch.Tensor
    s_offsets: torch.Tensor
    decay_scales: torch.Tensor
    out: torch.Tensor
    window: int = 0

    @property
    def softmax_scale(self) -> float:
        """The default of :func:`la_core.decode`."""
        return float(self.q.shape[2] ** -0.5)

    @property
    def layout(self) -> StateLayout:
        """Which of V and K is contiguous."""
        return "vk" if self.s.stride(2) == 1 else "kv"

    def in_layout(self, layout: StateLayout) -> DecodeCall:
        """The same memory, which must be dense, read as states of a layout."""
        if layout == self.layout:
            return self
        rows, v_size, k_size = self.s.shape
        if layout == "kv":
            return replace(self, s=self.s.view(rows, k_size, v_size).transpose(1, 2))
        return replace(self, s=self.s.transpose(1, 2).view(rows, v_size, k_size))

    def for_floor(self) -> DecodeCall:
        """The call whose states the in-place floor multiplies."""
        return self

    def without_pool(self) -> DecodeCall:
        """The call on the states [B*H, V, K] of its window."""
        rows, heads = self.q.shape[0], self.decay_scales.shape[0]
        return replace(self, s=self.s[self.window * heads : (self.window + rows) * heads])


@dataclass(frozen=True)
class Batch:
    """Arguments of one call that do not depend on the layer; `window` as in :class:`DecodeCall`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    s_offsets: torch.Tensor
    out: torch.Tensor
    window: int

    def on(self, layer: Layer) -> DecodeCall:
        """The whole call."""
        return DecodeCall(self.q, self.k, self.v, layer.pool, self.s_offsets, layer.decay_scales, self.out, self.window)


@dataclass(frozen=True)
class Layer:
    """What one linear layer adds: its number in the model, its slopes [H] and its pool [P*H, V, K]."""

    number: int
    decay_scales: torch.Tensor
    pool: torch.Tensor


@dataclass(frozen=True)
class WorkloadTensors:
    """Everything that is needed to make the calls of a workload."""

    batches: tuple[Batch, ...]
    layers: tuple[Layer, ...]

    @property
    def lap(self) -> list[tuple[Batch, Layer]]:
        """The calls in order, round and round; see :func:`lap_order`."""
        return [(self.batches[b], self.layers[n]) for b, n in lap_order(len(self.batches), len(self.layers))]


def lap_order(batches: int, layers: int) -> list[tuple[int, int]]:
    """Numbers of batch and layer of each call of a lap: both move on with every call.

    As in a model's step, a call never finds the states of the one before, and a layer comes up again only after all
    others have. Any `batches` calls in a row hold each batch once.
    """
    return [(n % batches, n % layers) for n in range(math.lcm(batches, layers))]


def pool_bytes(workload: Workload) -> int:
    """Bytes of one layer's pool, in float32."""
    return workload.load.slots * workload.model.heads * workload.model.head_size**2 * 4


def timed_layers(workload: Workload, arena_bytes: int) -> tuple[int, ...]:
    """Linear layers whose pools fit into the arena, evenly spread from the first to the last."""
    linear = workload.model.linear_layers
    count = max(1, min(arena_bytes // pool_bytes(workload), len(linear)))
    if count == 1:
        return linear[:1]
    return tuple(linear[round(i * (len(linear) - 1) / (count - 1))] for i in range(count))


def make_arena(workload: Workload, device: torch.device) -> torch.Tensor:
    """Random float32 numbers of order 1, as many as the workload needs for its pools."""
    limit = ARENA_BYTES[device.type]
    if device.type == "cuda":
        limit = min(limit, torch.cuda.mem_get_info(device)[0] // 2)
    size = len(timed_layers(workload, limit)) * pool_bytes(workload) // 4
    random = torch.Generator().manual_seed(0)
    some = torch.randn(min(size, 1 << 20), generator=random).to(device)
    arena = torch.empty(size, device=device)
    for start in range(0, size, some.numel()):
        part = arena[start : start + some.numel()]
        part.copy_(some[: part.numel()])
    return arena


def make_tensors(workload: Workload, arena: torch.Tensor, seed: int) -> WorkloadTensors:
    """The batches on the arena's device, and the pools as views of the arena."""
    model, device = workload.model, arena.device
    H, size = model.heads, model.head_size
    random = torch.Generator().manual_seed(seed)
    batches = []
    for offsets in workload.batches:
        fused = torch.randn(len(offsets), 3 * H * size, generator=random).to(device, torch.bfloat16)
        q, k, v = (part.view(-1, H, size) for part in torch.split(fused, H * size, dim=1))
        s_offsets = torch.tensor(offsets, dtype=torch.int32, device=device)
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
        first = min(slot for slot in offsets if slot >= 0)
        batches.append(Batch(q, k, v, s_offsets, out, max(0, min(first, workload.load.slots - len(offsets)))))
    elements = pool_bytes(workload) // 4
    layers = tuple(
        Layer(number, model.slopes(number).to(device), part.view(-1, size, size))
        for number, part in zip(timed_layers(workload, arena.nbytes), torch.split(arena, elements), strict=False)
    )
    return WorkloadTensors(tuple(batches), layers)


def reuse_distance(workload: Workload, layers: int) -> int:
    """Bytes of states that are visited before a state is visited again; nine of ten visits have at least that many.

    Counts laps over the batches and `layers` pools, round and round.
    """
    visits = [
        (layer, slot)
        for batch, layer in lap_order(len(workload.batches), layers)
        for slot in workload.batches[batch]
        if slot >= 0
    ]
    last = {state: position - len(visits) for position, state in enumerate(visits)}
    distances = []
    for position, state in enumerate(visits):
        distances.append(position - last[state] - 1)
        last[state] = position
    return sorted(distances)[len(distances) // 10] * workload.model.heads * workload.model.head_size**2 * 4
