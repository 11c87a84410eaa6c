"""vLLM: `linear_decode_forward_triton`, in Triton; SGLang ships a copy."""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path

import torch

from la_bench.peers.loading import find_file, load_file, module_with, required
from la_bench.peers.peer import Peer, as_slots
from la_bench.tensors import DecodeCall
from la_bench.timing import Bound

PLACES = (
    "vllm/model_executor/layers/lightning_attn.py",
    "sglang/kernels/ops/attention/linear/lightning_attn.py",
    "sglang/srt/layers/attention/linear/lightning_attn.py",
)


class VllmPeer(Peer):
    """States lie as [P, H, K, V]."""

    name = "vllm"
    differs = (
        "States [K, V]; allocates its output; applies no softmax scale; multiplies k and v in their own dtype; leaves "
        "the output of padding rows unwritten; takes q, k and v of one stride."
    )
    layouts = ("kv",)
    rounds_products = True

    def __init__(self, path: Path | None) -> None:
        self.file = find_file(self.name, path, PLACES)
        # Not before a peer is asked for: la-bench does without Triton.
        import triton
        import triton.language

        language = module_with("vllm.triton_utils", triton=triton, tl=triton.language)
        stand_ins = {"vllm": module_with("vllm"), "vllm.triton_utils": language}
        if importlib.util.find_spec("einops") is None:
            stand_ins["einops"] = module_with("einops", rearrange=_heads_behind_rows)
        self._decode = required(load_file(self.name, self.file, stand_ins), "linear_decode_forward_triton")

    def bind(self, call: DecodeCall) -> Bound:
        """See :class:`Peer`."""
        q, k, v = (tensor.unsqueeze(2) for tensor in (call.q, call.k, call.v))
        pool = as_slots(call.s, call.q.shape[1], "kv")
        return partial(self._decode, q, k, v, pool, call.decay_scales, call.s_offsets)

    def results(self, returned: object, call: DecodeCall) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The scale, which an engine would apply elsewhere, comes to the output."""
        assert isinstance(returned, torch.Tensor)
        scaled = returned.view(call.out.shape).float() * call.softmax_scale
        return scaled.to(call.out.dtype), None


def _heads_behind_rows(tensor: torch.Tensor, pattern: str) -> torch.Tensor:
    """What the decode path asks of `einops.rearrange`, where einops is not installed."""
    if pattern != "b h n d -> b n (h d)":
        raise NotImplementedError(f"only the pattern of the decode path is at hand, got {pattern!r}. Install einops.")
    return tensor.transpose(1, 2).flatten(2)
