"""What a peer is: how it is found, what it takes, how it is called, and what it does differently."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar, Literal

import torch

from la_bench.tensors import DecodeCall
from la_bench.timing import Bound
from la_core import DecodeProblem
from la_core.spec.decode_problem import StateLayout

HEAD_SIZE = 128
"""K and V of every workload, and the only size that all peers run."""


class PeerUnavailable(Exception):
    """The peer is not here or cannot be imported; the sentence says which."""


class PeerRefusal(Exception):
    """The peer cannot make this call; the sentence says why."""


class Peer(ABC):
    """One public kernel.

    Attributes
    ----------
    name, differs
        As options and reports call it, and in which ways it does not do what the contract says.
    layouts
        How its states lie in memory, the best choice first.
    io_dtypes, state_dtypes
        Dtypes of q, k and v, and of the states, that it takes.
    pooled
        Whether it finds states by slot in a pool. One that does not is handed a run of B neighbouring slots.
    padding
        What it does with a negative offset: leaves the row's output unwritten (`skipped`), computes the row like any
        other (`computed`), or must not be given one (`refused`).
    rounds_products
        Whether it rounds v times k to the dtype of q, k and v before adding, and is judged accordingly.
    """

    name: ClassVar[str]
    differs: str
    layouts: tuple[StateLayout, ...]
    io_dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    state_dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    pooled: bool = True
    padding: Literal["skipped", "computed", "refused"] = "skipped"
    rounds_products: bool = False
    file: Path | None = None

    @abstractmethod
    def __init__(self, path: Path | None) -> None:
        """Import it from a file or folder, or from where it is installed; raise `PeerUnavailable` otherwise."""

    @abstractmethod
    def bind(self, call: DecodeCall) -> Bound:
        """A call of the public function, with everything prepared that a caller would prepare once.

        Without a pool, `call.s` [B*H, V, K] holds the states of the rows in order.
        """

    def results(self, returned: object, call: DecodeCall) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Output, and the new states if they were not written in place, of a call that returned `returned`."""
        return call.out, None

    def layout(self, wanted: StateLayout) -> StateLayout:
        """The layout it runs with."""
        return wanted if wanted in self.layouts else self.layouts[0]

    def refusal(self, problem: DecodeProblem, *, padded: bool) -> str | None:
        """Why it cannot make a call; `padded` says whether some offsets are negative."""
        if problem.device.type != "cuda":
            return "runs CUDA tensors only"
        return self.limits(problem, padded=padded)

    def limits(self, problem: DecodeProblem, *, padded: bool) -> str | None:
        """Refusals that do not depend on the device."""
        if problem.K != HEAD_SIZE or problem.V != HEAD_SIZE:
            return f"is run at K = V = {HEAD_SIZE} only"
        if problem.G != problem.H:
            return "has as many heads of q and k as states"
        if problem.io_dtype not in self.io_dtypes:
            return f"does not take q, k and v in {str(problem.io_dtype).removeprefix('torch.')}"
        if problem.state_dtype not in self.state_dtypes:
            return f"does not keep states in {str(problem.state_dtype).removeprefix('torch.')}"
        if padded and self.padding == "refused":
            return "has no padding rows: a negative offset would address memory in front of the pool"
        return None

    def source_hash(self) -> str | None:
        """SHA-256 of the file that was loaded."""
        return hashlib.sha256(self.file.read_bytes()).hexdigest() if self.file else None


def as_slots(pool: torch.Tensor, heads: int, layout: StateLayout) -> torch.Tensor:
    """A pool [P*H, V, K] as [P, H, V, K], or as [P, H, K, V] in the other layout: contiguous in both."""
    dense = pool if layout == "vk" else pool.transpose(1, 2)
    return dense.view(-1, heads, *dense.shape[1:])
