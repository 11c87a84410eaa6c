"""What the compiler makes of a kernel for a named architecture: no GPU needed.

    python -m la_triton.compile_offline sm_90 [sm_80 ...]

prints registers, spills and 16-byte accesses of the kernels that batches of any size choose, in a model with
K = V = 128, bfloat16 q, k and v, and float32 states; those of the window operators with windows of 7 and of 16 places.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from triton.backends.nvidia.compiler import get_ptxas

from la_core.spec.decode_problem import DecodeProblem, StateLayout
from la_core.spec.window_problem import WindowOp, WindowProblem
from la_triton.decode_compile import DecodeCompileKey, compile_decode, decode_compile_key
from la_triton.decode_tiles import choose_decode_tiles
from la_triton.window_compile import KERNELS, WindowCompileKey, compile_window, window_compile_key
from la_triton.window_tiles import choose_window_tiles

ARCHES = {"sm_80": 80, "sm_90": 90, "sm_100": 100, "sm_120": 120}
"""Architectures that the kernel is checked for."""


@dataclass(frozen=True)
class KernelReport:
    """Facts of a compiled kernel.

    Attributes
    ----------
    registers
        Per thread.
    spill_bytes
        Bytes of registers stored to and loaded from local memory.
    shared_bytes
        Static shared memory of a block.
    wide_loads, wide_stores
        Accesses of global memory of 16 bytes a thread.
    """

    registers: int
    spill_bytes: int
    shared_bytes: int
    wide_loads: int
    wide_stores: int


def report_kernel(key: DecodeCompileKey | WindowCompileKey) -> KernelReport:
    """Compile a key and read the report of the assembler."""
    kernel = compile_window(key) if isinstance(key, WindowCompileKey) else compile_decode(key)
    ptx = kernel.asm["ptx"]
    target = re.search(r"^\.target (\S+)", ptx, flags=re.MULTILINE)
    assert target is not None
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        # As Triton asks for it: without fusing what the kernels do not fuse.
        options = ["-v", "--fmad=false", f"--gpu-name={target[1]}", "-o", str(Path(folder, "kernel.cubin"))]
        done = subprocess.run(
            [_ptxas(key.arch), *options, str(source)],
            capture_output=True,
            text=True,
            check=True,
        )
    registers = re.search(r"Used (\d+) registers", done.stderr)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr)
    assert registers is not None, done.stderr
    assert spills is not None, done.stderr
    return KernelReport(
        registers=int(registers[1]),
        spill_bytes=int(spills[1]) + int(spills[2]),
        shared_bytes=kernel.metadata.shared,
        wide_loads=len(re.findall(r"ld\.global\S*\.v4\.b32", ptx)),
        wide_stores=len(re.findall(r"st\.global\S*\.v4\.b32", ptx)),
    )


def _ptxas(arch: int) -> str:
    """Triton's own assembler for the architecture; releases differ in how it is asked for."""
    try:
        found = get_ptxas(arch)
    except TypeError:
        found = get_ptxas()
    return str(getattr(found, "path", found[0] if isinstance(found, tuple) else found))


def _keys(arch: int) -> list[DecodeCompileKey]:
    """The kernels that batches of 1 to 4096 rows of 8 heads choose, without and with overlap, aligned."""
    keys: dict[DecodeCompileKey, None] = {}
    layouts: tuple[StateLayout, ...] = ("vk", "kv")
    for layout, overlap, power in itertools.product(layouts, (False, True), range(13)):
        rows, capability = 1 << power, divmod(arch, 10)
        problem = DecodeProblem.contiguous(
            B=rows, P=rows, H=8, K=128, V=128, state_layout=layout, device="cuda", arch=capability
        )
        problem = replace(problem, overlap=overlap)
        keys[decode_compile_key(problem, arch, choose_decode_tiles(problem), aligned=True)] = None
    return list(keys)


def window_problem(op: WindowOp, **changes: Any) -> WindowProblem:
    """A call of a window operator on a GPU, for questions asked without tensors: 8 heads of K = V = 128, 16 places."""
    problem = WindowProblem.contiguous(op, B=1, P=100, N=16, H=8, K=128, V=128, device="cuda", arch=(9, 0))
    return replace(problem, **changes)


def _window_keys(arch: int) -> list[WindowCompileKey]:
    """The kernels of the window operators, aligned."""
    keys: dict[WindowCompileKey, None] = {}
    layouts: tuple[StateLayout, ...] = ("vk", "kv")
    for op, layout, places, overlap in itertools.product(KERNELS, layouts, (7, 16), (False, True)):
        problem = window_problem(op, N=places, state_layout=layout, overlap=overlap, arch=divmod(arch, 10))
        keys[window_compile_key(problem, arch, choose_window_tiles(problem), aligned=op != "advance")] = None
    return list(keys)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the reports for the named architectures, all of `ARCHES` by default."""
    names = list(sys.argv[1:] if arguments is None else arguments) or list(ARCHES)
    for name in names:
        if name not in ARCHES:
            sys.stderr.write(f"compile_offline: no architecture {name!r}. Known: {', '.join(ARCHES)}.\n")
            return 2
        for key in _keys(ARCHES[name]):
            layout, overlap = key.state_layout, " overlap" if key.overlap else ""
            sys.stdout.write(f"{name} {layout}{overlap} {key.tiles}: {report_kernel(key)}\n")
        for one in _window_keys(ARCHES[name]):
            overlap, places = " overlap" if one.overlap else "", f" up to {one.places} places" if one.places else ""
            what = f"{one.op} {one.state_layout}{overlap}{places}"
            sys.stdout.write(f"{name} {what} {one.tiles}: {report_kernel(one)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
