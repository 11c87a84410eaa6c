"""The window operators as operators of torch's dispatcher, for `torch.compile` alone; see `decode_traced`."""

from __future__ import annotations

import torch

from la_core.spec.kv_window import KVWindow


@torch.library.custom_op("la_core::decode_window", mutates_args=("s", "window_k", "window_v", "out"))
def decode_window_operator(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    s: torch.Tensor,
    s_offsets: torch.Tensor,
    decay_scales: torch.Tensor,
    window_k: torch.Tensor,
    window_v: torch.Tensor,
    start: torch.Tensor,
    length: torch.Tensor,
    softmax_scale: float | None,
    out: torch.Tensor,
    backend: str,
    check_offsets: bool | None,
) -> None:
    """Make the eager call when the compiled graph runs; raises what it raises."""
    from la_core.ops.window_decode import decode_window

    window = KVWindow(window_k, window_v, start, length)
    decode_window(q, k, v, s, s_offsets, decay_scales, window, softmax_scale, out, backend, check_offsets)


@torch.library.custom_op("la_core::verify", mutates_args=("window_k", "window_v", "out"))
def verify_operator(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    s: torch.Tensor,
    s_offsets: torch.Tensor,
    decay_scales: torch.Tensor,
    window_k: torch.Tensor,
    window_v: torch.Tensor,
    start: torch.Tensor,
    length: torch.Tensor,
    draft_lengths: torch.Tensor | None,
    softmax_scale: float | None,
    out: torch.Tensor,
    backend: str,
    check_offsets: bool | None,
) -> None:
    """Make the eager call when the compiled graph runs; raises what it raises."""
    from la_core.ops.verify import verify

    verify(
        *(q, k, v, s, s_offsets, decay_scales, KVWindow(window_k, window_v, start, length)),
        draft_lengths=draft_lengths,
        softmax_scale=softmax_scale,
        out=out,
        backend=backend,
        check_offsets=check_offsets,
    )


@torch.library.custom_op("la_core::commit", mutates_args=("s",))
def commit_operator(
    op: str,
    window_k: torch.Tensor,
    window_v: torch.Tensor,
    start: torch.Tensor,
    length: torch.Tensor,
    s: torch.Tensor,
    s_offsets: torch.Tensor,
    decay_scales: torch.Tensor,
    accepted: torch.Tensor | None,
    accepted_by_all: int,
    room: int | None,
    backend: str,
    check_offsets: bool | None,
) -> None:
    """Make the eager call of fold, commit or commit_layers when the compiled graph runs; raises what it raises."""
    from la_core.ops.commit import CALLS, run_commit

    window = KVWindow(window_k, window_v, start, length)
    counts = accepted_by_all if accepted is None else accepted
    run_commit(CALLS[op], window, s, s_offsets, decay_scales, counts, room, backend, check_offsets)


@torch.library.custom_op("la_core::advance", mutates_args=("start", "length"))
def advance_operator(
    window_k: torch.Tensor,
    start: torch.Tensor,
    length: torch.Tensor,
    s_offsets: torch.Tensor,
    accepted: torch.Tensor | None,
    accepted_by_all: int,
    room: int | None,
    backend: str,
    check_offsets: bool | None,
) -> None:
    """Make the eager call when the compiled graph runs; raises what it raises."""
    from la_core.ops.window_cursors import advance

    window = KVWindow(window_k, window_k, start, length)
    counts = accepted_by_all if accepted is None else accepted
    advance(window, s_offsets, counts, room=room, backend=backend, check_offsets=check_offsets)


@torch.library.custom_op("la_core::clear", mutates_args=("start", "length"))
def clear_operator(
    window_k: torch.Tensor,
    start: torch.Tensor,
    length: torch.Tensor,
    s_offsets: torch.Tensor,
    room: int | None,
    backend: str,
    check_offsets: bool | None,
) -> None:
    """Make the eager call when the compiled graph runs; raises what it raises."""
    from la_core.ops.window_cursors import clear

    window = KVWindow(window_k, window_k, start, length)
    clear(window, s_offsets, room=room, backend=backend, check_offsets=check_offsets)


def _nothing_to_infer(*arguments: object) -> None:
    """The results are in the arguments that are written."""


for _operator in (decode_window_operator, verify_operator, commit_operator, advance_operator, clear_operator):
    _operator.register_fake(_nothing_to_infer)
