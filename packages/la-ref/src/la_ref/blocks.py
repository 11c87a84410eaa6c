"""How the operators of this package cut a batch into blocks, and sum within them.

Bits of a result must not depend on the batch: whatever is not elementwise is summed by `sum_over`. Memory beside the
arguments is bounded by the size of a block, whatever the batch.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from la_core.spec.decode_problem import DecodeProblem
from la_core.spec.window_problem import WindowProblem

BLOCK_BYTES = {"cpu": 8 << 20, "cuda": 12 << 20}
"""Float32 bytes of the states in one block, and of what goes with them. CPU: a block stays in cache between its passes,
and fewer, larger blocks cost fewer calls; `la-bench ref --blocks` measures it. GPU: at most five such buffers live at
once, within 64 MiB. What is proportional to B or to H alone, a few numbers each, comes on top."""

MAX_TORCH_SUM = 16384
"""Longest sum left to torch: beyond 32768 it splits the sum of a single output among threads."""

MAX_PAIRS = 1 << 17
"""Most (row, head) pairs in a block or chunk, so that their indices stay small beside states of few elements."""


def can_read_back(problem: DecodeProblem | WindowProblem) -> bool:
    """Whether Python can look at offsets without a synchronisation, and so leave padding rows out."""
    return problem.device.type == "cpu"


Chunk = tuple[slice | torch.Tensor, slice | torch.Tensor, torch.Tensor | None]
"""Rows of `out` to write, rows of the inputs to read, and which of them are live (None: all)."""


def live_chunks(live: torch.Tensor, size: int, out: torch.Tensor | None = None) -> Iterator[Chunk]:
    """CPU: chunks of live rows only; clears the output of the others, if there is one."""
    if bool(live.all()):
        for start in range(0, live.shape[0], size):
            rows = slice(start, start + size)
            yield rows, rows, None
        return
    if out is not None:
        out[~live] = 0
    chosen = live.nonzero().squeeze(1)
    for some in torch.split(chosen, size) if chosen.shape[0] else ():
        yield some, some, None


def full_chunks(live: torch.Tensor, size: int) -> Iterator[Chunk]:
    """GPU: chunks of all rows; in each, padding rows read what its first live row reads, or the batch's."""
    first = live.int().argmax()
    for start in range(0, live.shape[0], size):
        mask = live[start : start + size]
        here = torch.arange(start, start + mask.shape[0], device=live.device)
        stand_in = torch.where(mask.any(), start + mask.int().argmax(), first)
        yield slice(start, start + size), torch.where(mask, here, stand_in), mask


def sum_over(products: torch.Tensor, dim: int, result: torch.Tensor) -> None:
    """Sum over `dim` into `result`, in an order that depends on its size alone; may overwrite `products`.

    Where `dim` is the last one, `products` must be contiguous.
    """
    size = products.shape[dim]
    if dim == products.ndim - 1 and size <= MAX_TORCH_SUM and products.device.type == "cpu":
        torch.sum(products, dim, out=result)
        return
    while size > 1:
        kept = (size + 1) // 2
        products.narrow(dim, 0, size - kept).add_(products.narrow(dim, kept, size - kept))
        size = kept
    result.copy_(products.select(dim, 0))


def in_wide_elements(s: torch.Tensor) -> torch.Tensor:
    """The same states in elements of 16 bytes, where a CPU allows it.

    torch scatters element by element there: larger ones are fewer, and keep every bit.
    """
    wide = torch.complex128
    per_wide = wide.itemsize // s.element_size()
    sizes = (s.storage_offset(), *s.stride()[:-1], s.shape[-1])
    if (
        s.device.type == "cpu"
        and s.stride(-1) == 1
        and s.data_ptr() % wide.itemsize == 0
        and not any(n % per_wide for n in sizes)
    ):
        return s.view(wide)
    return s
