"""Launching the kernels of the window operators; see `kernel_launch`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from la_core.spec.kv_window import KVWindow
from la_core.spec.window_problem import WindowProblem
from la_triton.decode_tiles import next_power_of_two
from la_triton.kernel_launch import KernelLaunch, grid_of_rows, launch_of, lock
from la_triton.window_compile import KERNELS, WindowCompileKey, compile_window, window_compile_key, window_constants
from la_triton.window_tiles import CURSOR_ROWS, WindowTiles, choose_window_tiles, padded_k


class WindowCall(NamedTuple):
    """A checked call as its kernel takes it."""

    io: tuple[torch.Tensor, ...]
    """q, k and v: the first two in pieces of 4 elements."""
    wide: tuple[torch.Tensor, ...]
    """States, and keys and values of the window, in pieces of 16 bytes."""
    tensors: tuple[torch.Tensor, ...]
    """All of them and the others, in the kernel's order."""
    numbers: tuple[float, ...]
    """Numbers of the call: the first that follow."""


def decode_window_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    s: torch.Tensor,
    s_offsets: torch.Tensor,
    decay_scales: torch.Tensor,
    window: KVWindow,
    softmax_scale: float,
    out: torch.Tensor,
) -> WindowCall:
    """A call of decode with a window."""
    wide = s, window.k, window.v
    tensors = q, k, v, s, s_offsets, decay_scales, window.k, window.v, window.start, window.length, out
    return WindowCall((q, k), wide, tensors, (softmax_scale,))


def verify_call(
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
) -> WindowCall:
    """A call of verify."""
    counts = s_offsets if draft_lengths is None else draft_lengths
    wide = s, window.k, window.v
    tensors = q, k, v, s, s_offsets, decay_scales, window.k, window.v, window.start, window.length, counts, out
    return WindowCall((q, k), wide, tensors, (softmax_scale,))


def commit_call(
    problem: WindowProblem,
    window: KVWindow,
    s: torch.Tensor,
    s_offsets: torch.Tensor,
    decay_scales: torch.Tensor,
    accepted: torch.Tensor | int,
    room: int | None,
) -> WindowCall:
    """A call of fold, commit or commit_layers."""
    counts, number = _counts(s_offsets, accepted)
    tensors = s, s_offsets, decay_scales, window.k, window.v, window.start, window.length, counts
    return WindowCall((), (s, window.k, window.v), tensors, (number, _room(problem, room)))


def advance_call(
    problem: WindowProblem,
    window: KVWindow,
    s_offsets: torch.Tensor,
    accepted: torch.Tensor | int,
    room: int | None,
    clear: bool,
) -> WindowCall:
    """A call of advance or clear."""
    counts, number = _counts(s_offsets, accepted)
    tensors = s_offsets, window.start, window.length, counts
    places = _room(problem, room) if clear else room or 0
    return WindowCall((), (), tensors, (number, places, int(clear)))


def _counts(s_offsets: torch.Tensor, accepted: torch.Tensor | int) -> tuple[torch.Tensor, int]:
    """The tensor of counts, or any in its place, and the number for all rows, limited so that it fits 32 bits."""
    return (accepted, 0) if isinstance(accepted, torch.Tensor) else (s_offsets, max(0, min(int(accepted), 64)))


def _room(problem: WindowProblem, room: int | None) -> int:
    """Places that a row must have left to be left alone; where none is asked for, more than there are."""
    return problem.N + 1 if room is None else room


class WindowLaunch(KernelLaunch[WindowProblem]):
    """A problem's grid, its arguments that are numbers, and its kernels for aligned and for other addresses."""

    __slots__ = ("io_mask", "numbers", "strides_aligned", "tiles")

    def __init__(self, problem: WindowProblem, tiles: WindowTiles | None = None) -> None:
        tiles = tiles or choose_window_tiles(problem)
        super().__init__(problem, _grid(problem, tiles))
        self.tiles = tiles
        self.numbers = _numbers(problem)
        self.io_mask = 0 if problem.io_dtype is None else 4 * problem.io_dtype.itemsize - 1
        self.strides_aligned = _strides_aligned(problem)

    def make(self, aligned: bool) -> tuple[WindowCompileKey, Callable[[], Any], tuple[Any, ...]]:
        """See :class:`KernelLaunch`."""
        key = window_compile_key(self.problem, self.arch, self.tiles, aligned=aligned)
        return key, partial(compile_window, key), tuple(window_constants(key).values())

    def __call__(self, call: WindowCall) -> None:
        """Launch on the current stream of the problem's device."""
        aligned = self.strides_aligned
        for tensor in call.wide:
            aligned = aligned and not tensor.data_ptr() & 15
        for tensor in call.io:
            aligned = aligned and not tensor.data_ptr() & self.io_mask
        addresses = [tensor.data_ptr() for tensor in call.tensors]
        self.start(aligned, (*addresses, *call.numbers, *self.numbers))

    def decode(self, *arguments: Any) -> None:
        """Launch a call with the arguments of :func:`decode_window_call`."""
        self(decode_window_call(*arguments))

    def verify(self, *arguments: Any) -> None:
        """Launch a call with the arguments of :func:`verify_call`."""
        self(verify_call(*arguments))

    def commit(self, *arguments: Any) -> None:
        """Launch a call with the arguments of :func:`commit_call`, without the problem."""
        self(commit_call(self.problem, *arguments))


def launch_window(problem: WindowProblem, call: WindowCall) -> None:
    """Run one checked call on a GPU."""
    launch_of(problem, WindowLaunch)(call)


def interpret_window(problem: WindowProblem, call: WindowCall, tiles: WindowTiles | None = None) -> None:
    """The same call under Triton's interpreter, for CPU tensors.

    A program costs about a millisecond there whatever it owns, so by default one owns all rows of V.
    """
    import numpy

    if tiles is None:
        inner = padded_k(max(1, problem.K)) if problem.state_layout == "vk" else 1
        tiles = WindowTiles(next_power_of_two(max(1, problem.V)), 1, inner)
    key = window_compile_key(problem, 0, tiles, aligned=False)
    # Infinities and NaN are values like others.
    with lock, numpy.errstate(all="ignore"):
        KERNELS[problem.op][_grid(problem, tiles)](
            *call.tensors, *call.numbers, *_numbers(problem), **window_constants(key, emulate_rounding=True)
        )


def _grid(problem: WindowProblem, tiles: WindowTiles) -> tuple[int, int, int]:
    if problem.op == "advance":
        return -(-problem.B // CURSOR_ROWS), 1, 1
    return grid_of_rows(problem.L * problem.H * -(-problem.V // tiles.block_v), problem.B)


def _strides_aligned(problem: WindowProblem) -> bool:
    """Whether strides lead from aligned addresses to aligned ones: of 16 bytes, in q and k of 4 elements."""
    if problem.op == "advance" or problem.state_dtype is None or problem.window_dtype is None:
        return False
    line = problem.K if problem.state_layout == "vk" else problem.V
    states, windows = problem.state_dtype.itemsize, problem.window_dtype.itemsize
    return (
        all(stride * states % 16 == 0 for stride in (*problem.s_strides, line))
        and all(stride * windows % 16 == 0 for stride in (*problem.window_k_strides, *problem.window_v_strides))
        and all(stride % 4 == 0 for stride in (*problem.q_strides, *problem.k_strides))
    )


def _numbers(problem: WindowProblem) -> tuple[int, ...]:
    """Run-time numbers behind those of the call, in the order of the kernel's signature."""
    sizes = problem.P, problem.N, problem.H, problem.H // max(1, problem.G)
    windows = *problem.window_k_strides, *problem.window_v_strides
    in_layer = *problem.window_k_strides[1:], *problem.window_v_strides[1:]
    io = problem.q_strides, problem.k_strides, problem.v_strides, problem.out_strides
    if problem.op == "advance":
        return problem.B, problem.P, problem.N
    if problem.op == "commit":
        return problem.B, *sizes, *windows, *problem.s_strides, -1
    if problem.op == "verify":
        strides = (stride for each in io for stride in each)
        return problem.B, problem.T, *sizes, *strides, *in_layer, problem.s_strides[1], -1
    strides = (stride for row, _, head in io for stride in (row, head))
    return problem.B, *sizes, *strides, *in_layer, problem.s_strides[1], -1
