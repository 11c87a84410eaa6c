"""A window: the k and v of tokens that are not yet in the state pool, as a ring of places per slot."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from la_core.spec.argument_checks import violation

MAX_PLACES = 64
"""The most places of a window."""


@dataclass(frozen=True, eq=False)
class KVWindow:
    """Up to `N` tokens per slot whose contribution is not yet in `s`.

    The pending tokens of slot `p` are at the places `(start[p] + i) % N` for `i < length[p]`, oldest first.

    Attributes
    ----------
    k : Tensor [P, N, G, K], the dtype of the calls' k and v, or float32
        Keys. Last stride 1, the others free. `[L, P, N, G, K]` for all layers of a model.
    v : Tensor [P, N, H, V]
        Values, in the dtype of `k`. `[L, P, N, H, V]` for all layers of a model.
    start, length : Tensor [P], int32, contiguous
        Cursors, shared by all layers; written by `advance` and `clear` only.
    """

    k: torch.Tensor
    v: torch.Tensor
    start: torch.Tensor
    length: torch.Tensor

    @classmethod
    def allocate(
        cls,
        *,
        P: int,
        N: int,
        H: int,
        K: int,
        V: int,
        G: int | None = None,
        layers: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> KVWindow:
        """An empty window for a pool of `P` slots, stacked if `layers` is given; `G` is `H` by default."""
        if G is None:
            G = H
        elif G < 1:
            raise violation("KVWindow.allocate", "G must be at least 1 or None", str(G), "Leave G out for G = H.")
        front = (P, N) if layers is None else (layers, P, N)
        return cls(
            torch.empty(*front, G, K, dtype=dtype, device=device),
            torch.empty(*front, H, V, dtype=dtype, device=device),
            torch.zeros(P, dtype=torch.int32, device=device),
            torch.zeros(P, dtype=torch.int32, device=device),
        )

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """`k`, `v`, `start` and `length`."""
        return self.k, self.v, self.start, self.length

    def layer(self, index: int) -> KVWindow:
        """The window of one layer of a stacked one; a view."""
        return KVWindow(self.k[index], self.v[index], self.start, self.length)
