"""Launching kernels: everything that a problem decides is worked out once, a call only reads addresses."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from threading import Lock
from typing import Any, Generic, TypeVar

import torch
import triton

from la_core.spec.decode_problem import DecodeProblem
from la_core.spec.window_problem import WindowProblem
from la_triton.kernel_parts import ROWS_PER_Z

MAX_LAUNCHES = 4096
"""Problems whose launches are kept; beyond it all are dropped."""

AnyProblem = TypeVar("AnyProblem", DecodeProblem, WindowProblem)
AnyLaunch = TypeVar("AnyLaunch", bound="KernelLaunch[Any]")

lock = Lock()
"""Held while a kernel is made, and while the interpreter runs: it keeps its state in module globals."""

_launches: dict[int, KernelLaunch[Any]] = {}
_kernels: dict[tuple[int, Hashable], Any] = {}


def kernels_made() -> int:
    """Kernels that this process has compiled or taken from Triton's cache, over all devices."""
    return len(_kernels)


class KernelLaunch(Generic[AnyProblem]):
    """A problem's grid, and its kernels for aligned and for other addresses."""

    __slots__ = ("_by_alignment", "grid", "index", "problem", "stream_of")

    def __init__(self, problem: AnyProblem, grid: tuple[int, int, int]) -> None:
        self.problem: AnyProblem = problem
        self.grid = grid
        self.index: int = problem.device.index or 0
        self.stream_of: Callable[[int], int] = triton.runtime.driver.active.get_current_stream
        self._by_alignment: list[tuple[Any, ...] | None] = [None, None]

    @property
    def arch(self) -> int:
        """Compute capability of the problem's device without the dot, such as 90."""
        major, minor = self.problem.arch or (0, 0)
        return 10 * major + minor

    def make(self, aligned: bool) -> tuple[Hashable, Callable[[], Any], tuple[Any, ...]]:
        """Key, compilation and compile-time arguments of the kernel for aligned or for other addresses."""
        raise NotImplementedError

    def _prepare(self, aligned: bool) -> tuple[Any, ...]:
        """The kernel for aligned or for other addresses, made when the first such call comes."""
        key, compile_it, constants = self.make(aligned)
        with lock:
            kernel = _kernels.get((self.index, key))
            if kernel is None:
                kernel = compile_it()
                _kernels[self.index, key] = kernel
            with torch.cuda.device(self.index):
                run = kernel.run  # the first access loads the machine code onto the current device
        prepared: tuple[Any, ...] = run, kernel.function, kernel.packed_metadata, constants
        self._by_alignment[aligned] = prepared
        return prepared

    def start(self, aligned: bool, arguments: tuple[Any, ...]) -> None:
        """Launch on the current stream of the problem's device.

        `arguments` are those of the kernel without constants, addresses as numbers: for a tensor Triton's launcher
        would call its method and ask the driver about it.
        """
        constants: tuple[Any, ...]
        run, function, metadata, constants = self._by_alignment[aligned] or self._prepare(aligned)
        index = self.index
        everything = (
            *self.grid,
            self.stream_of(index),
            function,
            metadata,
            None,
            None,
            None,
            *arguments,
            *constants,
        )
        if torch.cuda.current_device() == index:
            run(*everything)
        else:
            with torch.cuda.device(index):
                run(*everything)


def launch_of(problem: AnyProblem, make: Callable[[AnyProblem], AnyLaunch]) -> AnyLaunch:
    """The launch of a problem, kept for the next call with the same object."""
    launch: Any = _launches.get(id(problem))
    if launch is None or launch.problem is not problem:
        launch = make(problem)
        with lock:
            if len(_launches) >= MAX_LAUNCHES:
                _launches.clear()
            _launches[id(problem)] = launch
    return launch  # type: ignore[no-any-return]


def grid_of_rows(programs: int, rows: int) -> tuple[int, int, int]:
    """`programs` for each of `rows`, which a kernel finds on the second and third axis."""
    return programs, min(rows, ROWS_PER_Z), -(-rows // ROWS_PER_Z)
