"""decode as an operator of torch's dispatcher, for `torch.compile` alone.

Dispatching a mutating custom operator costs tens of microseconds, so eager calls go around it. A compiler, on the
other hand, must see one opaque operator that writes `s` and `out`, not the checks and the choice of a backend.
"""

from __future__ import annotations

import torch


@torch.library.custom_op("la_core::decode", mutates_args=("s", "out"))
def decode_operator(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    s: torch.Tensor,
    s_offsets: torch.Tensor,
    decay_scales: torch.Tensor,
    softmax_scale: float | None,
    out: torch.Tensor,
    backend: str,
    check_offsets: bool | None,
) -> None:
    """Make the eager call when the compiled graph runs; raises what it raises."""
    from la_core.ops.decode import decode

    decode(
        *(q, k, v, s, s_offsets, decay_scales),
        softmax_scale=softmax_scale,
        out=out,
        backend=backend,
        check_offsets=check_offsets,
    )


@decode_operator.register_fake
def _(*arguments: object) -> None:
    """Nothing to infer: the results are in `s` and `out`."""
