"""Runs a kernel's PTX on a CPU and watches every access to memory.

All threads of a grid go through the program together, one instruction at a time: a register is an array with one value
a thread. Threads that branch forward wait at their label; when some branch back, those that leave the loop wait behind
it. This is one order of many in which a GPU
may run the threads, and it stands for all of them because nothing may depend on the order: a thread that reads or
writes what another one has written, or writes what another one has read, is an error. A barrier ends that for the
shared memory of its block.

It knows the instructions that the kernels hold, and no others: an unknown one is an error that names the line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from ptx_arithmetic import ARITHMETIC, NUMPY, Array

WARP = 32
WORD = 2
"""Bytes that memory is kept in: no access of a kernel is smaller, and each lies at a multiple of its size."""

SHARED_BASE = 1024
"""Where a block's dynamic shared memory begins; not at 0, so that an address which forgets the base is seen."""

MOST_ROUNDS = 10_000
"""Of all loops together; more is taken for a loop that does not end."""

NOBODY, MANY = -1, -2
"""Instead of a thread: none, and more than one."""


class PtxError(Exception):
    """An instruction that is not known, or that did what no kernel may do."""


@dataclass(frozen=True)
class Instruction:
    """One line of a program; `guard` is the predicate that it hangs on, or empty."""

    line: int
    text: str
    guard: str
    negated: bool
    opcode: str
    operands: tuple[str, ...]


@dataclass(frozen=True)
class PtxKernel:
    """A parsed program: threads of a block, parameters with their sizes in bytes, instructions, labels."""

    threads: int
    parameters: dict[str, int]
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]


def parse_ptx(ptx: str) -> PtxKernel:
    """Read the only kernel of a module."""
    parameters, labels = {}, {}
    instructions: list[Instruction] = []
    threads = 0
    for number, line in enumerate(ptx.splitlines(), 1):
        text = line.split("//")[0].strip()
        if declared := re.match(r"\.param (?:\.align \d+ )?\.[a-z](\d+) (\w+)(?:\[(\d+)\])?,?$", text):
            bits, name, count = declared.groups()
            parameters[name] = int(bits) // 8 * int(count or 1)
        elif text.startswith(".reqntid"):
            threads = int(np.prod([int(size) for size in re.findall(r"\d+", text)]))
        elif label := re.match(r"(\$\w+):$", text):
            labels[label[1]] = len(instructions)
        elif text and text[0] not in ".(){}":
            parts = re.match(r"(?:@(!?)(%p\d+)\s+)?([\w.:]+)\s*(.*);$", text)
            if parts is None:
                raise PtxError(f"line {number}: cannot read {text!r}")
            negated, guard, opcode, rest = parts.groups()
            operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", rest)
            instructions.append(Instruction(number, text, guard or "", negated == "!", opcode, tuple(operands)))
    return PtxKernel(threads, parameters, tuple(instructions), labels)


class Memory:
    """Words with a record of who read and wrote them."""

    def __init__(self, words: Array) -> None:
        self.words = words
        self.read = np.zeros(len(words), bool)
        self.writes = np.zeros(len(words), np.int32)
        self.reader = np.full(len(words), NOBODY, np.int32)
        self.writer = np.full(len(words), NOBODY, np.int32)

    def load(self, at: Array, threads: Array) -> Array:
        """Words [threads, words of an access] at the places `at`."""
        threads = threads[:, None]
        writer = self.writer[at]
        if ((writer != NOBODY) & (writer != threads)).any():
            raise PtxError("a thread reads what another one has written")
        reader = self.reader[at]
        self.reader[at] = np.where((reader == NOBODY) | (reader == threads), threads, MANY)
        self.reader[at[self.reader[at] != threads]] = MANY
        self.read[at] = True
        loaded: Array = self.words[at]
        return loaded

    def store(self, at: Array, values: Array, threads: Array) -> None:
        """Write words [threads, words of an access] to the places `at`."""
        threads = threads[:, None]
        for owner, did in ((self.writer[at], "written"), (self.reader[at], "read")):
            if ((owner != NOBODY) & (owner != threads)).any():
                raise PtxError(f"a thread writes what another one has {did}")
        self.writer[at] = threads
        if (self.writer[at] != threads).any():
            raise PtxError("two threads write one place")
        self.writes[at] += 1
        self.words[at] = values


class GlobalMemory(Memory):
    """Allocations, by their address; `late` are those that the previous kernel may still read and write."""

    def __init__(self, allocations: Mapping[int, Array], late: Sequence[int] = ()) -> None:
        self.addresses = sorted(allocations)
        sizes = [allocations[address].nbytes for address in self.addresses]
        super().__init__(np.concatenate([allocations[address].view(np.uint16) for address in self.addresses]))
        self._starts = np.array(self.addresses, np.uint64)
        self._sizes = np.array(sizes, np.uint64)
        self._places = np.cumsum([0, *sizes]) // WORD
        self._late = np.isin(self._starts, np.array(late, np.uint64))

    def of(self, address: int, record: Array) -> Array:
        """The part of `words`, `read` or `writes` that belongs to an allocation."""
        index = self.addresses.index(address)
        part: Array = record[self._places[index] : self._places[index + 1]]
        return part

    def locate(self, addresses: Array, size: int, early: Array) -> Array:
        """The words of accesses of `size` bytes; `early` threads have not waited for the previous kernel."""
        which = np.searchsorted(self._starts, addresses, side="right") - 1
        offsets = addresses - self._starts[which]
        outside = (which < 0) | (offsets + np.uint64(size) > self._sizes[which])
        if outside.any():
            raise PtxError(f"{size} bytes at {int(addresses[outside][0]):#x} are in no allocation")
        if (early & self._late[which]).any():
            raise PtxError("an access to memory of the previous kernel, before the wait for it")
        first = self._places[which] + (offsets // np.uint64(WORD)).astype(np.int64)
        places: Array = first[:, None] + np.arange(size // WORD)
        return places


def run_ptx(
    kernel: PtxKernel,
    memory: GlobalMemory,
    parameters: Sequence[bytes],
    grid: tuple[int, int, int],
    shared_bytes: int = 0,
    overlap: bool = False,
    first: tuple[int, int, int] = (0, 0, 0),
) -> None:
    """Run a grid, or the part of one that begins at the block `first`.

    Parameters
    ----------
    kernel
        What to run.
    memory
        What it may access; it is written, and holds the record of it.
    parameters
        The bytes of each parameter.
    grid
        Blocks along x, y and z.
    shared_bytes
        Dynamic shared memory of a block.
    overlap
        Whether it starts while the previous kernel runs: then no thread may access what is `late` in `memory` before
        its `griddepcontrol.wait`.
    """
    declared, given = list(kernel.parameters.values()), [len(value) for value in parameters]
    if declared != given:
        raise PtxError(f"the parameters take {declared} bytes, and {given} are given")
    run = _Run(kernel, memory, parameters, grid, shared_bytes, overlap, first)
    with np.errstate(all="ignore"):
        position = 0
        while position < len(kernel.instructions):
            instruction = kernel.instructions[position]
            try:
                position = run.step(position, instruction)
            except PtxError as error:
                raise PtxError(f"line {instruction.line}: {instruction.text} {error}") from None
    if (run.resume <= len(kernel.instructions)).any():
        raise PtxError("a thread runs beyond the last instruction")


_REGISTERS = {"%p": np.dtype("bool"), "%rs": np.dtype("u2"), "%r": np.dtype("u4"), "%rd": np.dtype("u8")}


class _Run:
    """The state of all threads of a grid."""

    def __init__(
        self,
        kernel: PtxKernel,
        memory: GlobalMemory,
        parameters: Sequence[bytes],
        grid: tuple[int, int, int],
        shared_bytes: int,
        overlap: bool,
        first: tuple[int, int, int],
    ) -> None:
        self.kernel, self.memory, self.shared_bytes = kernel, memory, shared_bytes
        self.blocks = grid[0] * grid[1] * grid[2]
        self.count = self.blocks * kernel.threads
        self.thread = np.arange(self.count, dtype=np.int32)
        self.block, self.in_block = np.divmod(self.thread, kernel.threads)
        self.registers: dict[str, Array] = {"%tid.x": self.in_block.astype(np.uint32)}
        for axis, number, start in zip("zyx", np.unravel_index(self.block, grid[::-1]), first[::-1], strict=True):
            self.registers[f"%ctaid.{axis}"] = (number + start).astype(np.uint32)
        self.parameters = dict(zip(kernel.parameters, parameters, strict=True))
        # Bits that are NaN in every format, until they are written.
        self.shared = Memory(np.full(self.blocks * shared_bytes // WORD, 0xFFFF, np.uint16))
        self.early = np.full(self.count, overlap)
        self.resume = np.zeros(self.count, np.int64)
        """The position from which each thread goes on: behind the present one while it waits at a label."""
        self.active = self.resume == 0
        self.rounds = 0
        """Times that some threads went back."""

    def step(self, position: int, instruction: Instruction) -> int:
        """One instruction, in all threads that have come to it; the position of the next."""
        self.active = self.resume <= position
        if not self.active.any():
            return int(self.resume.min())
        if instruction.guard:
            self.active = self.active & (self.get(instruction.guard, "pred") ^ instruction.negated)
        opcode, operands = instruction.opcode, instruction.operands
        if opcode in ARITHMETIC:
            result, *sources = ARITHMETIC[opcode][0].split()
            values = [self.get(operand, kind) for operand, kind in zip(operands[1:], sources, strict=True)]
            self.put(operands[0], ARITHMETIC[opcode][1](*values).astype(NUMPY[result], copy=False))
        elif opcode in ("mov.b16", "mov.b32", "mov.u32", "mov.b64"):
            self._move(operands, opcode[-3:])
        elif opcode == "mov.pred":
            literal = {"0": False, "-1": True}.get(operands[1])
            self.put(operands[0], self.get(operands[1], "pred") if literal is None else np.full(self.count, literal))
        elif opcode in ("bra", "bra.uni"):
            target = self.kernel.labels[operands[0]]
            if target <= position and self.active.any():
                self.rounds += 1
                if self.rounds > MOST_ROUNDS:
                    raise PtxError("goes back without an end")
                self.resume = np.maximum(self.resume, position + 1)
                self.resume[self.active] = target
                return target
            self.resume[self.active] = max(target, position + 1)
        elif opcode == "ret":
            self.resume[self.active] = len(self.kernel.instructions) + 1
        elif opcode == "bar.sync" and operands == ("0",):
            taking_part = self._whole(self.kernel.threads, "block")
            for owners in (self.shared.reader, self.shared.writer):
                owners.reshape(self.blocks, -1)[taking_part] = NOBODY
        elif opcode in ("shfl.sync.bfly.b32", "shfl.sync.idx.b32") and operands[3:] == ("31", "-1"):
            self._whole(WARP, "warp")
            lane, number = self.thread % WARP, int(operands[2])
            source = self.thread - lane + (lane ^ number if "bfly" in opcode else number)
            self.put(operands[0], self.get(operands[1], "b32")[source])
        elif opcode == "griddepcontrol.wait":
            self.early[self.active] = False
        elif opcode in ("griddepcontrol.launch_dependents", "fence.acq_rel.gpu"):
            pass  # When the next kernel starts, and what it sees, is of no concern to this one.
        elif opcode == "prefetch.global.L2":
            pass  # Reads nothing that the kernel sees.
        elif access := re.match(r"(ld|st)\.(param|global|shared)(?:\.L2::cache_hint)?(?:\.v[24])?\.(\w+)$", opcode):
            self._access(access[1], access[2], access[3], operands)
        else:
            raise PtxError("is an instruction that the emulator does not know")
        return position + 1

    def get(self, operand: str, kind: str) -> Array:
        """The values of an operand, one for each thread: a register or a literal."""
        if operand[0] == "%":
            if operand not in self.registers:
                raise PtxError(f"reads {operand}, which is not set")
            bits = self.registers[operand]
        elif operand.startswith("__dynamic_shmem__"):
            bits = np.full(self.count, SHARED_BASE, np.uint32)
        else:
            literal = int(operand[2:], 16) if operand.startswith(("0f", "0x")) else int(operand)
            unsigned = np.dtype(f"u{NUMPY[kind].itemsize}")
            bits = np.full(self.count, literal % (1 << 8 * unsigned.itemsize), unsigned)
        if bits.itemsize != NUMPY[kind].itemsize:
            raise PtxError(f"reads {operand} of {8 * bits.itemsize} bits as {kind}")
        return bits.view(NUMPY[kind])

    def put(self, register: str, values: Array) -> None:
        """Set a register in the active threads; a smaller integer is extended by its sign, or by zeros."""
        held = _REGISTERS[register.rstrip("0123456789")]
        if values.itemsize < held.itemsize:
            values = values.astype(f"{values.dtype.kind}{held.itemsize}")
        if values.itemsize != held.itemsize:
            raise PtxError(f"{8 * values.itemsize} bits do not fit {register}")
        bits = values.view(held)
        if not self.active.all():
            bits = np.where(self.active, bits, self.registers.get(register, np.zeros(self.count, held)))
        self.registers[register] = bits

    def _whole(self, size: int, what: str) -> Array:
        """Which groups of `size` threads are here; an error if any is here in part."""
        groups = self.active.reshape(-1, size)
        if (groups.any(axis=1) != groups.all(axis=1)).any():
            raise PtxError(f"is reached by some threads of a {what} only")
        here: Array = groups.all(axis=1)
        return here

    def _move(self, operands: Sequence[str], kind: str) -> None:
        """Copy a value, split one into equal parts, or join parts; the lowest comes first, and `_` is not wanted."""
        target, source = (re.findall(r"[^{},\s]+", operand) for operand in operands)
        whole = NUMPY[kind].itemsize
        part = f"b{8 * whole // len(source)}"
        values = np.stack([self.get(name, part) for name in source], axis=1).view(f"u{whole // len(target)}")
        for index, name in enumerate(target):
            if name != "_":
                self.put(name, values[:, index].copy())

    def _access(self, way: str, space: str, kind: str, operands: Sequence[str]) -> None:
        """Load or store one value, or a few that lie side by side."""
        registers = re.findall(r"[^{},\s]+", operands[way == "st"])
        place = re.match(r"\[(\S+?)(?:\+(-?\d+))?\]$", operands[way == "ld"])
        if place is None:
            raise PtxError("has an address that cannot be read")
        size, offset = NUMPY[kind].itemsize * len(registers), int(place[2] or 0)
        if space == "param":
            value = self.parameters[place[1]][offset : offset + size]
            for register, number in zip(registers, np.frombuffer(value, NUMPY[kind]), strict=True):
                self.put(register, np.full(self.count, number))
            return
        if not self.active.any():
            return
        threads = self.thread[self.active]
        addresses = self.get(place[1], "u64" if space == "global" else "u32")[self.active].astype(np.int64) + offset
        if (addresses % size).any():
            raise PtxError(f"accesses {size} bytes at {int(addresses[addresses % size != 0][0]):#x}: not aligned")
        if space == "global":
            memory: Memory = self.memory
            at = self.memory.locate(addresses.view(np.uint64), size, self.early[self.active])
        else:
            memory = self.shared
            at = self._shared_places(addresses - SHARED_BASE, size)
        if way == "st":
            values = np.stack([self.get(register, kind)[self.active] for register in registers], axis=1)
            memory.store(at, values.view(np.uint16), threads)
            return
        loaded = np.zeros((self.count, size // WORD), np.uint16)
        loaded[self.active] = memory.load(at, threads)
        for index, values in enumerate(loaded.view(NUMPY[kind]).T):
            self.put(registers[index], values.copy())

    def _shared_places(self, offsets: Array, size: int) -> Array:
        """The words of accesses to each block's shared memory."""
        if ((offsets < 0) | (offsets + size > self.shared_bytes)).any():
            raise PtxError(f"leaves the {self.shared_bytes} bytes of shared memory")
        first = (self.block[self.active] * np.int64(self.shared_bytes) + offsets) // WORD
        places: Array = first[:, None] + np.arange(size // WORD)
        return places
