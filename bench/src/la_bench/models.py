"""The models whose decode steps are measured, as data."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from la_core import decay_slopes
from la_core.decay_slopes import SlopeConvention


@dataclass(frozen=True)
class Model:
    """One model as one rank of tensor parallelism sees it.

    Attributes
    ----------
    name
        As in workload names.
    title
        As its publisher writes it, with the tensor parallelism.
    num_heads
        Linear attention heads of the whole model.
    num_layers
        All layers.
    softmax_layers
        Layers that are not linear attention, counted from 0.
    convention
        Layer factor of the slopes; see :func:`la_core.decay_slopes`.
    tp_size
        Ranks of tensor parallelism.
    head_size
        K = V.
    """

    name: str
    title: str
    num_heads: int
    num_layers: int
    softmax_layers: tuple[int, ...]
    convention: SlopeConvention
    tp_size: int = 1
    head_size: int = 128

    @property
    def heads(self) -> int:
        """Heads of one rank."""
        return self.num_heads // self.tp_size

    @property
    def linear_layers(self) -> tuple[int, ...]:
        """Layers that keep a state pool, counted from 0 over all layers."""
        return tuple(layer for layer in range(self.num_layers) if layer not in self.softmax_layers)

    def slopes(self, layer: int) -> torch.Tensor:
        """Slopes [H] of rank 0 at a linear layer."""
        return decay_slopes(
            self.num_heads, layer, self.num_layers, convention=self.convention, tp_rank=0, tp_size=self.tp_size
        )


def last_of_each_group(num_layers: int, group: int) -> tuple[int, ...]:
    """Layers `group - 1`, `2 * group - 1`, ...: the rule of Ring, Ling and MiniMax for their softmax layers."""
    return tuple(range(group - 1, num_layers, group))


MODELS = (
    Model("ring-mini-linear-2.0", "Ring-mini-linear-2.0", 16, 20, last_of_each_group(20, 5), "minimax"),
    Model("ling-2.6-flash-tp4", "Ling-2.6-flash at TP 4", 32, 32, last_of_each_group(32, 8), "minimax", tp_size=4),
    Model("minimax-01-tp8", "MiniMax-01 at TP 8", 64, 80, last_of_each_group(80, 8), "minimax", tp_size=8),
    # Its configuration lists the kind of every layer; there is no rule behind the places of the softmax layers.
    Model("minicpm-sala", "MiniCPM-SALA", 32, 32, (0, 9, 16, 17, 22, 29, 30, 31), "none"),
)
