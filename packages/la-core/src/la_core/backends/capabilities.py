"""What a backend declares it can run, as data: asked by users, tested in both directions, printed in the docs."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

import torch

from la_core.spec.argument_checks import show_dtype, show_dtypes
from la_core.spec.decode_problem import IO_DTYPES, STATE_DTYPES, DecodeProblem
from la_core.spec.window_problem import WindowProblem


@dataclass(frozen=True)
class Capabilities:
    """What a backend runs. The defaults are the whole contract.

    Parameters
    ----------
    ops
        Operators implemented, by the names of the backend's methods, such as `("decode", "verify")`.
    device_types
        Types of device whose tensors it takes.
    io_dtypes, state_dtypes, out_dtypes, window_dtypes
        Dtypes of `q`, `k`, `v`; of `s`; of `out`; of a window.
    state_layouts
        Layouts of the states; see :class:`la_core.DecodeProblem`.
    k_sizes, v_sizes
        Sizes of K and V it runs; None for every size.
    sizes_text
        The sizes in words, for messages and the support table.
    min_arch
        Lowest compute capability of a CUDA device, such as `(8, 0)`; None for any.
    """

    ops: tuple[str, ...]
    device_types: tuple[str, ...]
    io_dtypes: tuple[torch.dtype, ...] = IO_DTYPES
    state_dtypes: tuple[torch.dtype, ...] = STATE_DTYPES
    out_dtypes: tuple[torch.dtype, ...] = IO_DTYPES
    state_layouts: tuple[str, ...] = ("vk", "kv")
    k_sizes: Container[int] | None = None
    v_sizes: Container[int] | None = None
    sizes_text: str = "any K and V"
    min_arch: tuple[int, int] | None = None
    window_dtypes: tuple[torch.dtype, ...] = IO_DTYPES

    def decode_refusal(self, problem: DecodeProblem) -> str | None:
        """The first declared limit that `problem` is outside of, as a sentence; None if it is inside all of them."""
        if "decode" not in self.ops:
            return "does not implement decode"
        dtypes = (
            ("q, k and v", problem.io_dtype, self.io_dtypes),
            ("s", problem.state_dtype, self.state_dtypes),
            ("out", problem.out_dtype, self.out_dtypes),
        )
        return self._device_refusal(problem) or self._facts_refusal(problem, dtypes)

    def window_refusal(self, problem: WindowProblem) -> str | None:
        """:meth:`decode_refusal` for an operator that works on a window."""
        if problem.op not in self.ops:
            return f"does not implement {problem.op}"
        reason = self._device_refusal(problem)
        if reason is not None or problem.op == "advance":
            return reason
        dtypes = (
            ("q, k and v", problem.io_dtype, self.io_dtypes),
            ("a window", problem.window_dtype, self.window_dtypes),
            ("s", problem.state_dtype, self.state_dtypes),
            ("out", problem.out_dtype, self.out_dtypes),
        )
        return self._facts_refusal(problem, dtypes)

    def _device_refusal(self, problem: DecodeProblem | WindowProblem) -> str | None:
        if problem.device.type not in self.device_types:
            return f"runs {' and '.join(self.device_types)} tensors, got {problem.device.type}"
        if self.min_arch is not None and problem.arch is not None and problem.arch < self.min_arch:
            return f"needs compute capability {_dotted(self.min_arch)} or newer, got {_dotted(problem.arch)}"
        return None

    def _facts_refusal(
        self,
        problem: DecodeProblem | WindowProblem,
        dtypes: tuple[tuple[str, torch.dtype | None, tuple[torch.dtype, ...]], ...],
    ) -> str | None:
        for name, dtype, allowed in dtypes:
            if dtype is not None and dtype not in allowed:
                return f"takes {name} in {show_dtypes(allowed)}, got {show_dtype(dtype)}"
        if problem.state_layout not in self.state_layouts:
            return f"takes state layout {' or '.join(self.state_layouts)}, got {problem.state_layout}"
        for size, allowed_sizes, letter in ((problem.K, self.k_sizes, "K"), (problem.V, self.v_sizes, "V")):
            if allowed_sizes is not None and size not in allowed_sizes:
                return f"runs {self.sizes_text}, got {letter} = {size}"
        return None

    def table_row(self) -> tuple[str, ...]:
        """Cells of the support table: devices, dtypes of q/k/v, of s, of out, layouts, sizes."""
        devices = ", ".join(self.device_types)
        if self.min_arch is not None:
            devices += f" (compute capability {_dotted(self.min_arch)} or newer)"
        dtypes = (", ".join(map(show_dtype, kinds)) for kinds in (self.io_dtypes, self.state_dtypes, self.out_dtypes))
        return (devices, *dtypes, ", ".join(self.state_layouts), self.sizes_text)


TABLE_HEADER = ("devices", "q, k, v", "s", "out", "state layouts", "sizes")
"""Column titles that go with :meth:`Capabilities.table_row`."""


def _dotted(arch: tuple[int, int]) -> str:
    return f"{arch[0]}.{arch[1]}"
