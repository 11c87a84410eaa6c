"""Launching the decode kernels: what a problem decides is worked out once, a call only looks at addresses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from la_core.spec.decode_problem import DecodeProblem
from la_cute.compiled_kernel_cache import compiled_kernel, origin_of
from la_cute.decode_tiles import ACCESS_BYTES, IO_PIECE, DecodeTiles
from la_cute.kernel_keys import key_of_decode
from la_cute.prebuilt_kernels import decode_call_of


class DecodeLaunch:
    """A problem's kernels for aligned and for other addresses, each made when the first such call comes."""

    __slots__ = ("_by_alignment", "_io_mask", "_strides_aligned", "problem", "tiles")

    def __init__(self, problem: DecodeProblem, tiles: DecodeTiles | None = None) -> None:
        self.problem = problem
        self.tiles = tiles
        self._io_mask = IO_PIECE * problem.io_dtype.itemsize - 1
        # The stride of an axis of one element leads nowhere.
        strides = (
            stride
            for sizes, pair in (
                ((problem.B, problem.G), problem.q_strides),
                ((problem.B, problem.G), problem.k_strides),
                ((problem.B, problem.H), problem.v_strides),
            )
            for size, stride in zip(sizes, pair, strict=True)
            if size > 1
        )
        self._strides_aligned = problem.s_row_stride * problem.state_dtype.itemsize % ACCESS_BYTES == 0 and all(
            stride % IO_PIECE == 0 for stride in strides
        )
        self._by_alignment: list[Any] = [None, None]

    def _prepare(self, aligned: bool) -> Any:
        key = key_of_decode(self.problem, self.tiles, aligned=aligned)
        function = self._by_alignment[aligned] = compiled_kernel(key)
        return function

    def direct(self, extents: tuple[int, ...]) -> Callable[..., bool] | None:
        """Native code that looks at addresses and calls the kernel, for the best addresses that the strides allow; None
        if that kernel is not there yet or was not prebuilt, or if torch has no function table of DLPack.
        """
        aligned = self._strides_aligned
        key = key_of_decode(self.problem, self.tiles, aligned=aligned)
        make = decode_call_of(key) if origin_of(key) == "prebuilt" else None
        if make is None:
            return None
        masks = (ACCESS_BYTES - 1, self._io_mask) if aligned else (0, 0)
        kernel = compiled_kernel(key)
        function: Callable[..., bool] | None = make(
            torch.Tensor, kernel, kernel.__chandle__(), self.problem.P, *masks, extents
        )
        return function

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
        aligned = self._strides_aligned and not (
            s.data_ptr() % ACCESS_BYTES or (q.data_ptr() | k.data_ptr() | v.data_ptr()) & self._io_mask
        )
        run = self._by_alignment[aligned] or self._prepare(aligned)
        run(s_offsets, s, decay_scales, q, k, v, out, softmax_scale, self.problem.P)
