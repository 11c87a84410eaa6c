"""cuLA: `linear_attention_decode`, in the CuTe DSL."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from la_bench.peers.loading import find_file, load_file, module_with, required
from la_bench.peers.peer import Peer
from la_bench.tensors import DecodeCall
from la_bench.timing import Bound

PLACES = ("cula/ops/la_decode.py",)


class CulaPeer(Peer):
    """Versions since its pull request 75 look up the pool; earlier ones run one block per state of what they get."""

    name = "cula"
    layouts = ("vk",)
    io_dtypes = (torch.bfloat16,)
    state_dtypes = (torch.float32,)
    padding = "refused"

    def __init__(self, path: Path | None) -> None:
        self.file = find_file(self.name, path, PLACES)
        # The package's __init__ imports kernels for other hardware. Its own default is fast math.
        utils = module_with("cula.utils", USE_FAST_MATH=True)
        self._module = load_file(self.name, self.file, {"cula": module_with("cula"), "cula.utils": utils})
        self._decode = required(self._module, "linear_attention_decode")
        self.pooled = "h0_indices[" in self.file.read_text(encoding="utf-8")
        pool = "" if self.pooled else " This version ignores s_offsets: it gets a run of neighbouring slots as states."
        self.differs = (
            "float32 states [V, K], output in bfloat16, fast math (its own default), compiled anew for each B, no "
            f"padding rows.{pool}"
        )
        self._compiled_for: dict[tuple[int, ...], tuple[object, ...]] = {}

    def bind(self, call: DecodeCall) -> Bound:
        """See :class:`Peer`."""
        B, H, size = call.q.shape
        # It keys compiled code by B and H only and bakes in shapes and strides: what was made for others must go.
        facts = (call.s.shape, call.q.stride(), call.k.stride(), call.v.stride(), call.out.stride())
        if self._compiled_for.setdefault((B, H), facts) != facts:
            self._forget()
            self._compiled_for = {(B, H): facts}
        strides = (call.q.stride(0), call.k.stride(0), call.v.stride(0), call.s.stride(0), call.out.stride(0))
        tensors = (call.q, call.k, call.v, call.s, call.out)
        scale = call.softmax_scale
        return partial(self._decode, *tensors, scale, *strides, call.s_offsets, call.decay_scales, size, size, size)

    def _forget(self) -> None:
        cache = getattr(self._module, "_get_compiled_kernel", None)
        if cache is not None:
            cache.cache_clear()
