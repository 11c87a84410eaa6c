"""flash-linear-attention: `fused_recurrent` with one decay per head, in Triton."""

from __future__ import annotations

import inspect
from functools import partial
from pathlib import Path

import torch

from la_bench.peers.loading import find_file, load_from_package, required
from la_bench.peers.peer import Peer, PeerUnavailable, as_slots
from la_bench.tensors import DecodeCall
from la_bench.timing import Bound
from la_core.spec.decode_problem import StateLayout

MODULE = "fla.ops.common.fused_recurrent"
PLACES = ("fla/ops/common/fused_recurrent.py",)
BARE = ("fla", "fla.ops", "fla.ops.common", "fla.ops.utils")
"""Packages whose `__init__` would import all operators."""


class FlaPeer(Peer):
    """It has no pool: states of the rows in order go in, new ones come out."""

    name = "fla"
    differs = (
        "No pool: reads neighbouring states and writes new ones to memory that it allocates, the same for each call, "
        "so that those of small calls stay in the cache; allocates a float32 output and converts it in a second "
        "kernel; makes q, k and v contiguous if they are not."
    )
    layouts: tuple[StateLayout, ...] = ("kv",)
    state_dtypes = (torch.float32,)
    pooled = False
    padding = "computed"

    def __init__(self, path: Path | None) -> None:
        self.file = find_file(self.name, path, PLACES)
        root = self.file.parents[3] if len(self.file.parents) > 3 else self.file.parent
        if not (root / PLACES[0]).is_file():
            raise PeerUnavailable(f"{self.file} needs the package around it. Pass the folder that holds fla")
        self._decode = required(load_from_package(root, MODULE, BARE), "fused_recurrent")
        if "state_v_first" in inspect.signature(self._decode).parameters:
            self.layouts = ("kv", "vk")

    def bind(self, call: DecodeCall) -> Bound:
        """See :class:`Peer`."""
        q, k, v = (tensor.unsqueeze(1) for tensor in (call.q, call.k, call.v))
        layout = call.layout
        options = {"state_v_first": True} if layout == "vk" else {}
        return partial(
            self._decode,
            q,
            k,
            v,
            g_gamma=-call.decay_scales,
            scale=call.softmax_scale,
            initial_state=as_slots(call.s, call.q.shape[1], layout),
            output_final_state=True,
            **options,
        )

    def results(self, returned: object, call: DecodeCall) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See :class:`Peer`."""
        assert isinstance(returned, tuple)
        out, states = returned
        if call.layout == "kv":
            states = states.transpose(2, 3)
        return out.squeeze(1), states.flatten(0, 1)
