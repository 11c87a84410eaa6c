"""What an operator allocates beside its arguments."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Allocations(TorchDispatchMode):
    """Counts operations, and the bytes of storages made while it is on that live at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.live = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        before = {t.untyped_storage()._cdata for t in torch.utils._pytree.tree_leaves((args, kwargs)) if _is_tensor(t)}
        result = func(*args, **(kwargs or {}))
        for tensor in filter(_is_tensor, torch.utils._pytree.tree_leaves(result)):
            storage = tensor.untyped_storage()
            if storage._cdata not in before and storage._cdata not in self.known:
                self.known.add(storage._cdata)
                self._count(storage)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        size, key = storage.nbytes(), storage._cdata
        self.live += size
        self.peak = max(self.peak, self.live)

        def freed() -> None:
            self.live -= size
            self.known.discard(key)

        weakref.finalize(storage, freed)


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)
