"""Launching the decode kernel: everything that a problem decides is worked out once, a call only reads addresses."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock
from typing import Any

import torch
import triton

from la_core.spec.decode_problem import DecodeProblem
from la_triton.decode_compile import DecodeCompileKey, compile_decode, decode_compile_key, kernel_constants
from la_triton.decode_kernel import ROWS_PER_Z, decode_kernel
from la_triton.decode_tiles import DecodeTiles, choose_decode_tiles, next_power_of_two

MAX_LAUNCHES = 4096
"""Problems whose launches are kept; beyond it all are dropped."""

_lock = Lock()
_launches: dict[int, DecodeLaunch] = {}
_kernels: dict[tuple[int, DecodeCompileKey], Any] = {}


def kernels_made() -> int:
    """Kernels that this process has compiled or taken from Triton's cache, over all devices."""
    return len(_kernels)


class DecodeLaunch:
    """A problem's grid, its arguments that are numbers, and its kernels for aligned and for other addresses."""

    __slots__ = (
        "_by_alignment",
        "grid",
        "index",
        "io_mask",
        "numbers",
        "problem",
        "stream_of",
        "strides_aligned",
        "tiles",
    )

    def __init__(self, problem: DecodeProblem, tiles: DecodeTiles | None = None) -> None:
        tiles = tiles or choose_decode_tiles(problem)
        self.problem = problem
        self.grid = _grid(problem, tiles)
        self.numbers = _numbers(problem)
        self.index: int = problem.device.index or 0
        self.io_mask = 4 * problem.io_dtype.itemsize - 1
        line = problem.K if problem.state_layout == "vk" else problem.V
        self.strides_aligned = (
            problem.s_row_stride * problem.state_dtype.itemsize % 16 == 0
            and line * problem.state_dtype.itemsize % 16 == 0
            and all(stride % 4 == 0 for stride in (*problem.q_strides, *problem.k_strides))
        )
        self.stream_of: Callable[[int], int] = triton.runtime.driver.active.get_current_stream
        self.tiles = tiles
        self._by_alignment: list[tuple[Any, ...] | None] = [None, None]

    def _prepare(self, aligned: bool) -> tuple[Any, ...]:
        """The kernel for aligned or for other addresses, made when the first such call comes."""
        major, minor = self.problem.arch or (0, 0)
        key = decode_compile_key(self.problem, 10 * major + minor, self.tiles, aligned=aligned)
        with _lock:
            kernel = _kernels.get((self.index, key))
            if kernel is None:
                kernel = compile_decode(key)
                _kernels[self.index, key] = kernel
            with torch.cuda.device(self.index):
                run = kernel.run  # the first access loads the machine code onto the current device
        prepared = run, kernel.function, kernel.packed_metadata, tuple(kernel_constants(key).values())
        self._by_alignment[aligned] = prepared
        return prepared

    def __call__(
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
        run, function, metadata, constants = self._by_alignment[aligned] or self._prepare(aligned)
        index = self.index
        # Addresses as numbers: for a tensor Triton's launcher would call its method and ask the driver about it.
        arguments = (
            *self.grid,
            self.stream_of(index),
            function,
            metadata,
            None,
            None,
            None,
            q_start,
            k_start,
            v.data_ptr(),
            s_start,
            s_offsets.data_ptr(),
            decay_scales.data_ptr(),
            out.data_ptr(),
            softmax_scale,
            *self.numbers,
            *constants,
        )
        if torch.cuda.current_device() == index:
            run(*arguments)
        else:
            with torch.cuda.device(index):
                run(*arguments)


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
    launch = _launches.get(id(problem))
    if launch is None or launch.problem is not problem:
        launch = DecodeLaunch(problem)
        with _lock:
            if len(_launches) >= MAX_LAUNCHES:
                _launches.clear()
            _launches[id(problem)] = launch
    launch(q, k, v, s, s_offsets, decay_scales, softmax_scale, out)


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
    # The interpreter keeps its state in module globals; infinities and NaN are values like others to it.
    with _lock, numpy.errstate(all="ignore"):
        decode_kernel[_grid(problem, tiles)](
            *(q, k, v, s, s_offsets, decay_scales, out, softmax_scale),
            *_numbers(problem),
            **kernel_constants(key, emulate_rounding=True),
        )


def _grid(problem: DecodeProblem, tiles: DecodeTiles) -> tuple[int, int, int]:
    blocks = -(-problem.V // tiles.block_v)
    return problem.H * blocks, min(problem.B, ROWS_PER_Z), -(-problem.B // ROWS_PER_Z)


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
