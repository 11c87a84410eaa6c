"""Launching the decode kernel: everything that a problem decides is worked out once, a call only reads addresses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from la_core.spec.decode_problem import DecodeProblem
from la_triton.decode_compile import DecodeCompileKey, compile_decode, decode_compile_key, kernel_constants
from la_triton.decode_kernel import decode_kernel
from la_triton.decode_tiles import DecodeTiles, choose_decode_tiles, next_power_of_two
from la_triton.kernel_launch import KernelLaunch, grid_of_rows, kernels_made, launch_of, lock

__all__ = ["DecodeLaunch", "interpret_decode", "kernels_made", "launch_decode"]


class DecodeLaunch(KernelLaunch[DecodeProblem]):
    """A problem's grid, its arguments that are numbers, and its kernels for aligned and for other addresses."""

    __slots__ = ("io_mask", "numbers", "strides_aligned", "tiles")

    def __init__(self, problem: DecodeProblem, tiles: DecodeTiles | None = None) -> None:
        tiles = tiles or choose_decode_tiles(problem)
        super().__init__(problem, _grid(problem, tiles))
        self.tiles = tiles
        self.numbers = _numbers(problem)
        self.io_mask = 4 * problem.io_dtype.itemsize - 1
        line = problem.K if problem.state_layout == "vk" else problem.V
        self.strides_aligned = (
            problem.s_row_stride * problem.state_dtype.itemsize % 16 == 0
            and line * problem.state_dtype.itemsize % 16 == 0
            and all(stride % 4 == 0 for stride in (*problem.q_strides, *problem.k_strides))
        )

    def make(self, aligned: bool) -> tuple[DecodeCompileKey, Callable[[], Any], tuple[Any, ...]]:
        """See :class:`KernelLaunch`."""
        key = decode_compile_key(self.problem, self.arch, self.tiles, aligned=aligned)
        return key, partial(compile_decode, key), tuple(kernel_constants(key).values())

    def decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        s: torch.Tensor,
        s_offsets: torch.Tensor,
        decay_scales: torch.Tensor,
        softmax_scale: float,
        out: torch.Tensor,
    ) -> None:
        """Launch on the current stream of the problem's device."""
        q_start, k_start, s_start = q.data_ptr(), k.data_ptr(), s.data_ptr()
        aligned = self.strides_aligned and not (s_start & 15 or (q_start | k_start) & self.io_mask)
        self.start(
            aligned,
            (
                q_start,
                k_start,
                v.data_ptr(),
                s_start,
                s_offsets.data_ptr(),
                decay_scales.data_ptr(),
                out.data_ptr(),
                softmax_scale,
                *self.numbers,
            ),
        )


def launch_decode(
    problem: DecodeProblem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    s: torch.Tensor,
    s_offsets: torch.Tensor,
    decay_scales: torch.Tensor,
    softmax_scale: float,
    out: torch.Tensor,
) -> None:
    """Run one checked call on a GPU; arguments as in :meth:`la_core.backends.backend_contract.Backend.decode`."""
    launch = launch_of(problem, DecodeLaunch)
    launch.decode(q, k, v, s, s_offsets, decay_scales, softmax_scale, out)


def interpret_decode(
    problem: DecodeProblem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    s: torch.Tensor,
    s_offsets: torch.Tensor,
    decay_scales: torch.Tensor,
    softmax_scale: float,
    out: torch.Tensor,
    tiles: DecodeTiles | None = None,
) -> None:
    """The same call under Triton's interpreter, for CPU tensors.

    A program costs about a millisecond there whatever it owns, so by default one owns all rows of V.
    """
    import numpy

    tiles = tiles or DecodeTiles(block_v=next_power_of_two(problem.V), num_warps=1)
    key = decode_compile_key(problem, 0, tiles, aligned=False)
    # Infinities and NaN are values like others.
    with lock, numpy.errstate(all="ignore"):
        decode_kernel[_grid(problem, tiles)](
            *(q, k, v, s, s_offsets, decay_scales, out, softmax_scale),
            *_numbers(problem),
            **kernel_constants(key, emulate_rounding=True),
        )


def _grid(problem: DecodeProblem, tiles: DecodeTiles) -> tuple[int, int, int]:
    return grid_of_rows(problem.H * -(-problem.V // tiles.block_v), problem.B)


def _numbers(problem: DecodeProblem) -> tuple[int, ...]:
    """Run-time numbers behind `scale`, in the order of the kernel's signature."""
    return (
        problem.B,
        problem.P,
        problem.H,
        problem.H // problem.G,
        *problem.q_strides,
        *problem.k_strides,
        *problem.v_strides,
        *problem.out_strides,
        problem.s_row_stride,
        -1,
    )
