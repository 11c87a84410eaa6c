"""What the compiler makes of the kernels for a named architecture: no GPU needed.

    python -m la_cute.compile_offline sm_90a [sm_80 ...]

prints registers, stack and 16-byte accesses of the kernels that batches of any size choose, in a model with
K = V = 128, bfloat16 q, k and v, float32 states, and windows of 8 places.
"""

from __future__ import annotations

import itertools
import re
import struct
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from la_core.spec.decode_problem import DecodeProblem, StateLayout
from la_cute.decode_compile_key import ARCHES
from la_cute.kernel_keys import KernelKey, keys_of_problem
from la_cute.window_compile_key import CursorsCompileKey
from la_cute.window_problems import window_problems

PLACES = 8
"""Of the windows that are reported on."""

_REGISTERS, _FRAME_BYTES = 0x2F04, 0x1104
"""Entries of a cubin's `.nv.info`: registers of a thread, and bytes of its stack frame."""


@dataclass(frozen=True)
class KernelReport:
    """Facts of a compiled kernel.

    Attributes
    ----------
    registers
        Per thread.
    stack_bytes
        Of a thread's frame in local memory; registers are spilled to it, so 0 means no spills.
    wide_loads, wide_stores
        Accesses of global memory of 16 bytes a thread.
    """

    registers: int
    stack_bytes: int
    wide_loads: int
    wide_stores: int


def report_kernel(key: KernelKey) -> KernelReport:
    """Compile a key and read the machine code's own description of itself."""
    with tempfile.TemporaryDirectory() as folder:
        artifacts = key.compile(f"--keep-cubin --keep-ptx --dump-dir={folder}").artifacts
    facts = dict(_kernel_facts(artifacts.CUBIN))
    return KernelReport(
        registers=facts[_REGISTERS],
        stack_bytes=facts[_FRAME_BYTES],
        wide_loads=len(re.findall(r"ld\.global\S*\.(?:v4\.b32|v2\.b64)", artifacts.PTX)),
        wide_stores=len(re.findall(r"st\.global\S*\.(?:v4\.b32|v2\.b64)", artifacts.PTX)),
    )


def _kernel_facts(cubin: bytes) -> Iterator[tuple[int, int]]:
    """Entries of `.nv.info` that hold one number for the only kernel of an ELF file of 64 bits."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names_at = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + n * size) for n in range(count)]
    names = headers[names_at][4]
    for name, _, _, _, start, length in headers:
        if cubin[names + name :].split(b"\0", 1)[0] != b".nv.info":
            continue
        position = start
        while position < start + length:
            entry, payload = struct.unpack_from("<HH", cubin, position)
            if entry in (_REGISTERS, _FRAME_BYTES):
                yield entry, struct.unpack_from("<II", cubin, position + 4)[1]
            # Entries of format 4 hold as many bytes as they say; the others hold their value in these two.
            position += 4 + (payload if entry & 0xFF == 4 else 0)


def _keys(capability: tuple[int, int]) -> list[KernelKey]:
    """The kernels that batches of 1 to 4096 rows of 8 heads choose, without and with overlap, aligned."""
    keys: dict[KernelKey, None] = {}
    layouts: tuple[StateLayout, ...] = ("vk", "kv")
    for layout, overlap, power in itertools.product(layouts, (False, True), range(13)):
        rows = 1 << power
        problem = DecodeProblem.contiguous(
            B=rows, P=rows, H=8, K=128, V=128, state_layout=layout, device="cuda", arch=capability
        )
        problem = replace(problem, overlap=overlap)
        keys[keys_of_problem(problem)[0]] = None
        for window in window_problems(problem, PLACES, (torch.int32,)):
            keys[keys_of_problem(window)[0]] = None
    return list(keys)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the reports for the named architectures, all of `ARCHES` by default."""
    names = list(sys.argv[1:] if arguments is None else arguments) or list(ARCHES)
    for name in names:
        if name not in ARCHES:
            sys.stderr.write(f"compile_offline: no architecture {name!r}. Known: {', '.join(ARCHES)}.\n")
            return 2
        for key in _keys(ARCHES[name]):
            shape = "" if isinstance(key, CursorsCompileKey) else f" {key.state_layout} {key.tiles}"
            overlap = " overlap" if not isinstance(key, CursorsCompileKey) and key.overlap else ""
            sys.stdout.write(f"{name} {key.op}{overlap}{shape}: {report_kernel(key)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
