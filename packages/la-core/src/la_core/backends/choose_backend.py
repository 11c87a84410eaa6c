"""Which backend runs a call, with the reason for every one that does not."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import warnings
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple

from la_core.backends.backend_contract import Backend
from la_core.backends.discover_backends import KNOWN_NAMES, installed_names, load_backend
from la_core.spec.decode_problem import DecodeProblem
from la_core.spec.errors import BackendUnavailable, SpecViolation, UnsupportedByBackend
from la_core.spec.window_problem import WindowProblem

Problem = DecodeProblem | WindowProblem

AUTO = "auto"

PREFERENCE = {"cuda": KNOWN_NAMES}
"""Order in which `"auto"` tries backends, by type of device; `ref` alone for types not named."""

ENV_BACKEND = os.environ.get("LA_BACKEND") or AUTO
"""The process-wide default, read once at import: reading the environment costs more than all checks together."""


class CallDefaults(NamedTuple):
    """What holds for calls here and now.

    Attributes
    ----------
    backend
        What `backend="auto"` means: set by `use_backend`, `LA_BACKEND` otherwise.
    overlap
        Whether kernels may start before the previous one has ended: set by `use_overlap`.
    """

    backend: str
    overlap: bool


@functools.cache
def call_defaults(backend: str, overlap: bool) -> CallDefaults:
    """The one object with these values, so that a call can compare by identity."""
    return CallDefaults(backend, overlap)


PROCESS_DEFAULTS = call_defaults(ENV_BACKEND, False)
current_defaults: ContextVar[CallDefaults] = ContextVar("la_core_defaults", default=PROCESS_DEFAULTS)


@dataclass(frozen=True)
class Choice:
    """The outcome of choosing: a backend or None, and a verdict in words for every candidate."""

    backend: Backend | None
    asked: str
    verdicts: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        verdicts = "; ".join(f"{name}: {verdict}" for name, verdict in self.verdicts) or "no backend is installed"
        return f"{verdicts}; chosen: {self.backend.name if self.backend else 'none'} (asked for {self.asked!r})"


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Make `name` the backend of calls that leave `backend` at `"auto"`, in this thread or task, inside the block.

    Parameters
    ----------
    name
        A backend's name, or `"auto"` for the order of preference whatever `LA_BACKEND` says.

    Raises
    ------
    BackendUnavailable
        At once, if there is no usable backend of that name.
    """
    check_backend_name(name)
    if name != AUTO:
        load_backend(name)
    token = current_defaults.set(call_defaults(name, current_defaults.get().overlap))
    try:
        yield
    finally:
        current_defaults.reset(token)


@contextlib.contextmanager
def use_overlap(enabled: bool = True) -> Iterator[None]:
    """Let calls inside the block overlap with the kernel before them, in this thread or task.

    A backend that can (on GPUs of compute capability 9.0 and newer, by programmatic dependent launch) starts its
    kernel while the previous one in the stream is still running: states, offsets and slopes are loaded at once, and so
    are the cursors and pending tokens of a window; `q`, `k` and `v` only when the previous kernel has ended and its
    writes are visible. Results are the same bits.

    The caller's duty: the previous kernel in the stream must write neither the slots that a call reads nor its
    `s_offsets` and `decay_scales`, and it must not be the `advance` or `clear` of its window. Where that kernel
    overlaps itself, neither must the one before it, and so on back to the last kernel that was launched without
    overlap. So calls that overlap and have no other kernel between them must name no slot twice: layers with pools of
    their own keep to that, two calls of one layer do not.

    Parameters
    ----------
    enabled
        False turns it off again inside the block.
    """
    token = current_defaults.set(call_defaults(current_defaults.get().backend, bool(enabled)))
    try:
        yield
    finally:
        current_defaults.reset(token)


def check_backend_name(name: object, op: str = "decode") -> str:
    """Refuse what cannot be a backend's name."""
    if not isinstance(name, str) or not name:
        came = repr(name) if isinstance(name, str) else f"a {type(name).__name__}"
        raise SpecViolation(
            f"{op}: backend must be a backend's name or 'auto'; got {came}. "
            f"Installed: {', '.join(installed_names()) or 'none'}."
        )
    return name


def choose_backend(problem: Problem, asked: str = AUTO, op: str = "decode") -> Backend:
    """The backend that runs `problem`.

    Parameters
    ----------
    problem
        The facts of a legal call.
    asked
        A name is obeyed or refused; `"auto"` means the default of `use_backend` or `LA_BACKEND`, and failing
        those the first of the order of preference that runs the call.
    op
        The operator as its caller spells it, for messages.

    Raises
    ------
    UnsupportedByBackend
        The named backend, or every candidate, refuses this call. The sentence gives each reason.
    BackendUnavailable
        The named backend, or every candidate, cannot be loaded.
    """
    name = _resolve(asked, op)
    if name != AUTO:
        try:
            backend = load_backend(name)
        except BackendUnavailable as reason:
            raise BackendUnavailable(f"{op}: {_named_by(asked)}{reason}") from reason.__cause__
        refusal = refusal_of(backend, problem)
        if refusal is not None:
            raise UnsupportedByBackend(
                f"{op}: {_named_by(asked)}backend {name!r} {refusal}. The call is legal ({problem.describe()}): "
                "choose another backend, or 'auto'."
            )
        return backend
    unusable: list[str] = []
    for candidate in _preferred(problem):
        able, verdict = _judge(candidate, problem)
        if able is not None:
            for why in unusable:
                warnings.warn(f"{op} runs on {candidate!r}: {why}", RuntimeWarning, stacklevel=_caller_level())
            return able
        if verdict.startswith(_UNUSABLE):
            unusable.append(verdict)
    choice = explain(problem, asked, op)
    if any(verdict.startswith(_REFUSED) for _, verdict in choice.verdicts):
        raise UnsupportedByBackend(f"{op}: no installed backend runs this call ({problem.describe()}). {choice}.")
    remedy = "" if "ref" in installed_names() else " Run: python3 -m pip install la-ref"
    raise BackendUnavailable(f"{op}: no usable backend for {problem.device.type} tensors. {choice}.{remedy}")


def explain(problem: Problem, asked: str = AUTO, op: str = "decode") -> Choice:
    """What `choose_backend` would do and why, for every candidate and every other installed backend."""
    name = _resolve(asked, op)
    preferred = _preferred(problem)
    candidates = dict.fromkeys((*preferred, *installed_names(), *(() if name == AUTO else (name,))))
    eligible = preferred if name == AUTO else (name,)
    verdicts: list[tuple[str, str]] = []
    chosen: Backend | None = None
    for candidate in candidates:
        backend, verdict = _judge(candidate, problem)
        if backend is not None and candidate in eligible:
            chosen = chosen or backend
        elif backend is not None and candidate not in preferred:
            verdict += ", but chosen only by name"
        verdicts.append((candidate, verdict))
    return Choice(chosen, name, tuple(verdicts))


def refusal_of(backend: Backend, problem: Problem) -> str | None:
    """Why `backend` will not run `problem`, None if it will. A backend is asked about operators that it has only: one
    that was written before an operator existed cannot judge its problems.
    """
    if isinstance(problem, WindowProblem) and problem.op not in backend.capabilities.ops:
        return f"does not implement {problem.op}"
    return backend.refusal(problem)


_UNUSABLE, _REFUSED = "unusable", "refused"


def _judge(candidate: str, problem: Problem) -> tuple[Backend | None, str]:
    """The backend if it runs `problem`, and the verdict in words."""
    if candidate not in installed_names():
        return None, "not installed"
    try:
        backend = load_backend(candidate)
    except BackendUnavailable as reason:
        return None, f"{_UNUSABLE}, {reason}"
    refusal = refusal_of(backend, problem)
    if refusal is not None:
        return None, f"{_REFUSED}, {refusal}"
    return backend, "ok"


def _preferred(problem: Problem) -> tuple[str, ...]:
    return PREFERENCE.get(problem.device.type, ("ref",))


def _resolve(asked: str, op: str) -> str:
    return current_defaults.get().backend if check_backend_name(asked, op) == AUTO else asked


def _named_by(asked: str) -> str:
    if asked == AUTO and ENV_BACKEND != AUTO and current_defaults.get().backend == ENV_BACKEND:
        return f"LA_BACKEND={ENV_BACKEND}: "
    return ""


def _caller_level() -> int:
    """How many frames above the caller of this function the first one outside of this package is, for warnings."""
    level, frame = 0, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "la_core":
        level, frame = level + 1, frame.f_back
    return level + 1
