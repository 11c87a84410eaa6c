"""The first decode call of a process, in parts: run as a program of its own, once for each sample.

It imports what it is told, makes CUDA context and tensors, and then makes the call in the steps that the call itself
would go through. Each step is remembered by whoever does it, so the next one finds it done, and none is done twice.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import Any

import torch

from la_bench.timing import wait_for_gpu
from la_core import decode, decode_problem
from la_core.backends.discover_backends import load_backend

B, H, P, SIZE = 4, 16, 8, 128
LATER_CALLS = 20


def first_call(backend: str, package: str, device: str, imports: list[str]) -> dict[str, Any]:
    """Milliseconds of the parts of the first call and of each later one; modules that the first imported, and kernels.

    Parameters
    ----------
    package
        Of the backend, where its modules are looked for.
    imports
        Modules to import before; what cannot be imported by its name is left out.
    """
    for name in imports:
        # Some modules are made while another is imported, and have no file.
        with suppress(Exception):
            importlib.import_module(name)
    tensors = _tensors(torch.device(device))
    steps: dict[str, Callable[[], object]] = {"discovery": partial(load_backend, backend)}
    look = _look_for_prebuilt(package)
    if look is not None:
        steps["library"] = partial(look, tensors)
    steps["rest"] = partial(decode, *tensors, backend=backend)
    before = set(sys.modules)
    parts = {name: _milliseconds(step) for name, step in steps.items()}
    imported = [name for name in sys.modules if name not in before]
    later = [_milliseconds(steps["rest"]) for _ in range(LATER_CALLS)]
    return {"parts": parts, "later": later, "imported": imported, "kernels": _kernels(package)}


def _tensors(device: torch.device) -> tuple[torch.Tensor, ...]:
    """Arguments of a call; on a GPU they bring the context with them."""
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, H, SIZE, generator=random).to(device, torch.bfloat16) for _ in range(3))
    s = torch.zeros(P * H, SIZE, SIZE, device=device)
    s_offsets = torch.randperm(P, generator=random)[:B].int().to(device)
    tensors = (q, k, v, s, s_offsets, (torch.rand(H, generator=random) + 0.1).to(device))
    wait_for_gpu()
    return tensors


def _look_for_prebuilt(package: str) -> Callable[[tuple[torch.Tensor, ...]], object] | None:
    """What reads a package's sources and its library of prebuilt kernels, as a call does; None without such a thing."""
    try:
        prebuilt: Any = importlib.import_module(f"{package}.prebuilt_kernels")
    except ImportError:
        return None
    tiles: Any = importlib.import_module(f"{package}.decode_tiles")
    keys: Any = importlib.import_module(f"{package}.decode_compile_key")

    def look(tensors: tuple[torch.Tensor, ...]) -> object:
        problem = decode_problem(*tensors)
        return prebuilt.why_missing(keys.decode_compile_key(problem, tiles.choose_decode_tiles(problem), aligned=True))

    return look


def _milliseconds(step: Callable[[], object]) -> float:
    start = perf_counter()
    step()
    wait_for_gpu()
    return (perf_counter() - start) * 1e3


def _kernels(package: str) -> dict[str, int]:
    """Kernels that were made, by where they came from; empty where nobody can tell."""
    # Only now: what it imports must not count as there before the first call.
    from la_bench.kernel_watch import kernel_counter

    counter = kernel_counter(package)
    if counter is None:
        return {}
    return {"made": counter.made()} if counter.origins is None else dict(counter.origins())


def main() -> None:
    """Options as a JSON object on stdin, the result as one on stdout, whatever else is printed on stderr."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as target:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        json.dump(first_call(**json.load(sys.stdin)), target)


if __name__ == "__main__":
    main()
