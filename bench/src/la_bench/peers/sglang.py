"""SGLang: the decode path of `seg_la_fwd`, in Triton."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from la_bench.peers.loading import find_file, load_file, required
from la_bench.peers.peer import Peer, as_slots
from la_bench.tensors import DecodeCall
from la_bench.timing import Bound

PLACES = (
    "sglang/kernels/ops/attention/linear/seg_la.py",
    "sglang/srt/layers/attention/linear/seg_la.py",
)


class SglangPeer(Peer):
    """States lie as [P, H, K, V]."""

    name = "sglang"
    differs = "States [K, V]; allocates its output; leaves the output of padding rows unwritten."
    layouts = ("kv",)

    def __init__(self, path: Path | None) -> None:
        self.file = find_file(self.name, path, PLACES)
        module = load_file(self.name, self.file, {})
        self._decode = required(module, "seg_la_fwd")
        self._meta = required(module, "SegLaMeta")

    def bind(self, call: DecodeCall) -> Bound:
        """See :class:`Peer`."""
        B = len(call.q)
        counts = torch.ones(B, dtype=torch.int32, device=call.q.device)
        starts = torch.arange(B + 1, dtype=torch.int32, device=call.q.device)
        meta = self._meta(B, 1, q_offsets=starts, s_offsets=call.s_offsets, q_lengths=counts, s_scales=counts)
        pool = as_slots(call.s, call.q.shape[1], "kv")
        tensors = (call.q, call.k, call.v, pool, call.decay_scales, meta)
        return partial(self._decode, *tensors, softmax_scale=call.softmax_scale)

    def results(self, returned: object, call: DecodeCall) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See :class:`Peer`."""
        assert isinstance(returned, torch.Tensor)
        return returned, None
