"""Decode as one writes it first in torch: gather, update, sum, scatter."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from la_bench.peers.peer import Peer
from la_bench.tensors import DecodeCall
from la_bench.timing import Bound
from la_core import DecodeProblem


class TorchNaivePeer(Peer):
    """No kernel of its own, so it runs on every device."""

    name = "torch-naive"
    differs = "Plain torch: copies the states out of the pool and back, in float32; no padding rows."
    layouts = ("vk", "kv")
    padding = "refused"

    def __init__(self, path: Path | None) -> None:
        """There is nothing to find."""

    def refusal(self, problem: DecodeProblem, *, padded: bool) -> str | None:
        """See :class:`Peer`."""
        return self.limits(problem, padded=padded)

    def bind(self, call: DecodeCall) -> Bound:
        """See :class:`Peer`."""
        pool = call.s.view(-1, call.q.shape[1], *call.s.shape[1:])
        decays = torch.exp(-call.decay_scales)[:, None, None]
        return partial(naive_decode, call.q, call.k, call.v, pool, call.s_offsets, decays, call.softmax_scale, call.out)


def naive_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pool: torch.Tensor,
    s_offsets: torch.Tensor,
    decays: torch.Tensor,
    softmax_scale: float,
    out: torch.Tensor,
) -> None:
    """Rows of `pool` [P, H, V, K] are replaced; `decays` [H, 1, 1] are the factors of a step."""
    states = pool[s_offsets].float() * decays
    states += v.float()[..., None] * k.float()[..., None, :]
    pool[s_offsets] = states.to(pool.dtype)
    out.copy_((states @ q.float()[..., None])[..., 0] * softmax_scale)
