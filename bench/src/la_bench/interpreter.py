"""A backend for GPUs judged on a CPU: its calls are made under its interpreter, in a Python process of their own.

Triton decides at import whether it interprets, so it cannot be switched on in a process that runs already. The call's
tensors go to the other process with all of their memory, gaps included, and come back: what judges a call sees every
byte that the backend wrote. The time of an interpreted call says nothing and is never taken.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
from typing import IO, Any

import torch

from la_bench.peers.peer import PeerRefusal
from la_bench.tensors import DecodeCall
from la_bench.variants import BackendVariant
from la_core import DecodeProblem, KVWindow, UnsupportedByBackend, decode
from la_core.conformance.window_cases import WindowCase
from la_core.conformance.window_inputs import WindowInputs

INTERPRETERS = {"triton": ("Triton's interpreter", {"TRITON_INTERPRET": "1"})}
"""By backend: its interpreter, and what must be set before Python starts."""

MOST_STATES = 256
"""Heads x rows of a call that is judged: a light load, and one or two seconds."""


READ = ("q", "k", "v", "s", "s_offsets", "decay_scales", "counts")
"""Of the arguments of an operator with a window, those that come by these names."""

END_SECONDS = 60
"""What a process may take to end by itself."""


class Interpreter:
    """The other process; it starts with the first call."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, call: DecodeCall) -> None:
        """Make the call there, and write what it left in memory to the call's own pool and output."""
        tensors = (call.q, call.k, call.v, call.s, call.s_offsets, call.decay_scales, call.out)
        self._ask(tensors, {"s": call.s, "out": call.out})

    def run_action(self, action: WindowInputs) -> None:
        """The same for a call of an operator with a window."""
        window = action.window
        written = {"s": action.s, "window_k": window.k, "window_v": window.v}
        written |= {"start": window.start, "length": window.length}
        if action.out is not None:
            written["out"] = action.out
        case = action.case
        read = {name: getattr(action, name) for name in READ if name != "s"}
        case_facts = {"op": case.op, "L": case.L, "room": case.room}
        self._ask({**read, **written, **case_facts}, written)

    def _ask(self, message: object, written: dict[str, torch.Tensor]) -> None:
        """Send a call there, and write what it left in memory to the tensors that it writes."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "la_bench.interpreter", self.backend],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, **INTERPRETERS[self.backend][1]},
                # A terminal sends Ctrl-C to the whole group of processes, and that is this program's to answer.
                start_new_session=True,
            )
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            _send(process.stdin, message)
            reply = _receive(process.stdout)
        except OSError:
            reply = None
        if reply is None:
            self.close()
            raise RuntimeError(f"the process that interprets {self.backend} ended, with status {process.returncode}")
        if "refused" in reply:
            raise UnsupportedByBackend(reply["refused"])
        if "error" in reply:
            raise RuntimeError(reply["error"])
        for name, mine in written.items():
            _bytes(mine).copy_(_bytes(reply[name]))

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            try:
                self._process.communicate(timeout=END_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.communicate()
            self._process = None


class InterpretedVariant(BackendVariant):
    """A backend that is judged under its interpreter, and not timed."""

    def __init__(self, backend: str) -> None:
        super().__init__(backend)
        self.untimed = f"judged under {INTERPRETERS[backend][0]}, whose time says nothing: not timed"
        self._interpreter = Interpreter(backend)

    def start(self) -> None:
        """Kernels that are made in the other process are not counted here."""
        return

    def check(self, problem: DecodeProblem, *, padded: bool) -> None:
        """See :class:`la_bench.variants.Variant`."""
        states = problem.B * problem.H
        if states > MOST_STATES:
            raise PeerRefusal(
                f"{self.name} is judged under {INTERPRETERS[self.backend][0]} here, which is slow: with at most "
                f"{MOST_STATES} states in a call, got {states}"
            )

    def run(self, call: DecodeCall) -> torch.Tensor:
        """See :class:`la_bench.variants.Variant`."""
        self._interpreter.run(call)
        return call.out

    def run_action(self, action: WindowInputs) -> None:
        """Make a call of an operator with a window."""
        self._interpreter.run_action(action)

    def close(self) -> None:
        """See :class:`la_bench.variants.Variant`."""
        self._interpreter.close()


def serve(backend: str, source: IO[bytes], target: IO[bytes]) -> None:
    """Make the calls that come in until there are no more."""
    while (message := _receive(source)) is not None:
        try:
            written = _make_action(message, backend) if isinstance(message, dict) else _make_call(message, backend)
        except UnsupportedByBackend as reason:
            _send(target, {"refused": str(reason)})
        except Exception as reason:
            _send(target, {"error": f"{type(reason).__name__}: {reason}"})
        else:
            _send(target, written)


def _make_call(tensors: tuple[torch.Tensor, ...], backend: str) -> dict[str, torch.Tensor]:
    *arguments, out = tensors
    decode(*arguments, out=out, backend=backend)
    return {"s": arguments[3], "out": out}


def _make_action(message: dict[str, Any], backend: str) -> dict[str, torch.Tensor]:
    from la_bench.window_variants import bind_action

    action = WindowInputs(
        case=WindowCase(message["op"], L=message["L"], room=message["room"]),
        window=KVWindow(*(message[name] for name in ("window_k", "window_v", "start", "length"))),
        out=message.get("out"),
        buffers={},
        **{name: message[name] for name in READ},
    )
    bind_action(action, backend)()
    written = ("s", "window_k", "window_v", "start", "length", "out")
    return {name: message[name] for name in written if name in message}


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """All memory that the tensor is a view of."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def _send(target: IO[bytes], message: object) -> None:
    buffer = io.BytesIO()
    torch.save(message, buffer)
    content = buffer.getbuffer()
    target.write(len(content).to_bytes(8, "little"))
    target.write(content)
    target.flush()


def _receive(source: IO[bytes]) -> Any:
    """The next message; None at the end."""
    size = int.from_bytes(source.read(8), "little")
    content = source.read(size)
    if not content or len(content) < size:
        # Also what Ctrl-C left of one that was being sent.
        return None
    return torch.load(io.BytesIO(content), weights_only=True)


def main() -> None:
    """The other process: messages on stdin and stdout, and whatever a backend prints on stderr."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as target:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        serve(sys.argv[1], sys.stdin.buffer, target)


if __name__ == "__main__":
    main()
