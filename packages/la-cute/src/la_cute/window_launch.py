"""Launching the kernels of the window operators: a problem is looked at once, a call's addresses each time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from la_core.spec.kv_window import MAX_PLACES, KVWindow
from la_core.spec.window_problem import WindowProblem
from la_cute.compiled_kernel_cache import compiled_kernel
from la_cute.decode_tiles import ACCESS_BYTES, IO_PIECE
from la_cute.kernel_keys import key_of_window
from la_cute.window_compile_key import cursors_compile_key
from la_cute.window_tiles import WindowTiles


class WindowLaunch:
    """The kernels of a problem with states, for aligned and for other addresses, each made when first needed."""

    __slots__ = ("_by_alignment", "_io_mask", "_strides_aligned", "_window_mask", "problem", "tiles")

    def __init__(self, problem: WindowProblem, tiles: WindowTiles | None = None) -> None:
        assert problem.state_dtype is not None
        assert problem.window_dtype is not None
        self.problem = problem
        self.tiles = tiles
        # commit has no q, k and v.
        self._io_mask = IO_PIECE * (problem.io_dtype or problem.window_dtype).itemsize - 1
        self._window_mask = IO_PIECE * problem.window_dtype.itemsize - 1
        rows = (problem.B, problem.T)
        places = (problem.L, problem.P, problem.N)
        in_pieces = (
            *_steps((*rows, problem.G), problem.q_strides),
            *_steps((*rows, problem.G), problem.k_strides),
            *_steps((*rows, problem.H), problem.v_strides),
            *_steps((*places, problem.G), problem.window_k_strides),
            *_steps((*places, problem.H), problem.window_v_strides),
        )
        states = _steps((problem.L, problem.P * problem.H), problem.s_strides)
        self._strides_aligned = all(stride % IO_PIECE == 0 for stride in in_pieces) and all(
            stride * problem.state_dtype.itemsize % ACCESS_BYTES == 0 for stride in states
        )
        self._by_alignment: list[Any] = [None, None]

    def _kernel(self, states: int, inputs: int, window: int) -> Any:
        """The kernel for the bits of all addresses of the states, of q, k and v, and of the window."""
        unaligned = states % ACCESS_BYTES or inputs & self._io_mask or window & self._window_mask
        aligned = self._strides_aligned and not unaligned
        return self._by_alignment[aligned] or self._prepare(aligned)

    def _prepare(self, aligned: bool) -> Any:
        key = key_of_window(self.problem, self.tiles, aligned=aligned)
        function = self._by_alignment[aligned] = compiled_kernel(key)
        return function

    def decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        s: torch.Tensor,
        s_offsets: torch.Tensor,
        decay_scales: torch.Tensor,
        window: KVWindow,
        softmax_scale: float,
        out: torch.Tensor,
    ) -> None:
        """Launch on the current stream of the problem's device."""
        inputs = q.data_ptr() | k.data_ptr() | v.data_ptr()
        run = self._kernel(s.data_ptr(), inputs, window.k.data_ptr() | window.v.data_ptr())
        run(
            *(s_offsets, s, decay_scales, q, k, v, out),
            *(window.k, window.v, window.start, window.length, softmax_scale),
        )

    def verify(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        s: torch.Tensor,
        s_offsets: torch.Tensor,
        decay_scales: torch.Tensor,
        window: KVWindow,
        draft_lengths: torch.Tensor | None,
        softmax_scale: float,
        out: torch.Tensor,
    ) -> None:
        """Launch on the current stream of the problem's device."""
        inputs = q.data_ptr() | k.data_ptr() | v.data_ptr()
        run = self._kernel(s.data_ptr(), inputs, window.k.data_ptr() | window.v.data_ptr())
        run(
            *(s_offsets, s, decay_scales, q, k, v, out),
            *(window.k, window.v, window.start, window.length, draft_lengths, softmax_scale),
        )

    def commit(
        self,
        window: KVWindow,
        s: torch.Tensor,
        s_offsets: torch.Tensor,
        decay_scales: torch.Tensor,
        accepted: torch.Tensor | int,
        room: int | None,
    ) -> None:
        """Launch on the current stream of the problem's device."""
        problem, k, v = self.problem, window.k, window.v
        run = self._kernel(s.data_ptr(), 0, k.data_ptr() | v.data_ptr())
        if s.dim() == 4:
            # A kernel takes the first layer, and the way to the next.
            s, k, v, decay_scales = s[0], k[0], v[0], decay_scales[0]
        run(
            *(s_offsets, s, decay_scales, k, v, window.start, window.length),
            *(*_counts(accepted), _room(room), problem.L),
            *(problem.s_strides[0], problem.window_k_strides[0], problem.window_v_strides[0]),
        )


class CursorsLaunch:
    """The kernel of a problem of `advance`."""

    __slots__ = ("_run", "problem")

    def __init__(self, problem: WindowProblem) -> None:
        self.problem = problem
        self._run: Any = None

    def advance(
        self,
        window: KVWindow,
        s_offsets: torch.Tensor,
        accepted: torch.Tensor | int,
        room: int | None,
        clear: bool,
    ) -> None:
        """Launch on the current stream of the problem's device."""
        run = self._run
        if run is None:
            run = self._run = compiled_kernel(cursors_compile_key(self.problem))
        places = _room(room) if clear else room or 0
        run(s_offsets, window.start, window.length, *_counts(accepted), self.problem.N, places, int(clear))


def _steps(sizes: tuple[int, ...], strides: tuple[int, ...]) -> Iterable[int]:
    """Strides without those of axes of one element, which lead nowhere."""
    return (stride for size, stride in zip(sizes, strides, strict=True) if size > 1)


def _counts(accepted: torch.Tensor | int) -> tuple[torch.Tensor | None, int]:
    """As a tensor, and as a number that is used without one."""
    return (None, min(max(accepted, 0), MAX_PLACES)) if isinstance(accepted, int) else (accepted, 0)


def _room(room: int | None) -> int:
    """As a number: more than any window has, which all rows lack, stands for None."""
    return MAX_PLACES + 1 if room is None else min(room, MAX_PLACES + 1)
