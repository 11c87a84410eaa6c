"""Finding installed backends by entry point, importing one only when it is asked for.

A backend that cannot be used is never dropped silently: asking for it raises the reason, listing shows it.
"""

from __future__ import annotations

import importlib.metadata
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from la_core.backends.backend_contract import Backend
from la_core.spec.errors import BackendUnavailable
from la_core.version import SPEC_REVISION

ENTRY_POINT_GROUP = "la_core.backends"

KNOWN_NAMES = ("cute", "triton", "ref")
"""Backends of this project, in order of preference; the distribution of `x` is `la-x`."""

_lock = threading.RLock()
_entry_points: dict[str, list[importlib.metadata.EntryPoint]] | None = None
_loaded: dict[str, Backend | BackendUnavailable] = {}

when_forgotten: list[Callable[[], None]] = []
"""Called by `forget_backends`: whoever remembers a choice of backend adds how to drop it."""


@dataclass(frozen=True)
class BackendInfo:
    """One installed backend.

    Attributes
    ----------
    name
        The name to pass as `backend=`.
    distribution
        Name and version of the distribution that brings it, such as `la-ref 0.1.0`.
    spec_revision
        The contract it implements; None if it could not be loaded.
    error
        Why it cannot be used; None if it can.
    """

    name: str
    distribution: str
    spec_revision: int | None
    error: str | None


def installed_names() -> tuple[str, ...]:
    """Names of all installed backends, sorted; imports none of them."""
    return tuple(sorted(_find_entry_points()))


def load_backend(name: str) -> Backend:
    """The backend of that name, imported on first use.

    Raises
    ------
    BackendUnavailable
        It is not installed, two distributions claim the name, its import failed, it is not a backend, or it was
        written for another revision of the contract.
    """
    with _lock:
        found = _loaded.get(name)
        if found is None:
            try:
                found = _load(name)
            except BackendUnavailable as reason:
                found = reason
            _loaded[name] = found
    if isinstance(found, BackendUnavailable):
        # A fresh exception each time: raising one object twice would pile up tracebacks.
        raise BackendUnavailable(str(found)) from found.__cause__
    return found


def list_backends() -> list[BackendInfo]:
    """Every installed backend with its version and, if it cannot be used, the reason. Imports all of them."""
    infos = []
    for name in installed_names():
        distribution = " and ".join(_distribution(point) for point in _find_entry_points()[name])
        try:
            backend = load_backend(name)
            infos.append(BackendInfo(name, distribution, backend.spec_revision, None))
        except BackendUnavailable as reason:
            infos.append(BackendInfo(name, distribution, None, str(reason)))
    return infos


def forget_backends() -> None:
    """Look for entry points again at the next call, for processes that install a backend while they run."""
    global _entry_points
    with _lock:
        _entry_points = None
        _loaded.clear()
    for forget in when_forgotten:
        forget()


def _find_entry_points() -> dict[str, list[importlib.metadata.EntryPoint]]:
    global _entry_points
    with _lock:
        if _entry_points is None:
            found: dict[str, list[importlib.metadata.EntryPoint]] = defaultdict(list)
            for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
                # An editable install can show the same entry twice: once by its finder, once by its folder.
                if all((point.value, _distribution(point)) != (p.value, _distribution(p)) for p in found[point.name]):
                    found[point.name].append(point)
            _entry_points = dict(found)
        return _entry_points


def _distribution(point: importlib.metadata.EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else "an unnamed distribution"


def _pip_name(point: importlib.metadata.EntryPoint) -> str:
    return point.dist.name if point.dist is not None else f"la-{point.name}"


def _load(name: str) -> Backend:
    points = _find_entry_points().get(name)
    if not points:
        installed = ", ".join(installed_names()) or "none"
        remedy = (
            f"Run: python3 -m pip install la-{name}"
            if name in KNOWN_NAMES
            else "Check the name, or install the distribution that brings it."
        )
        raise BackendUnavailable(f"backend {name!r} is not installed (installed: {installed}). {remedy}")
    if len(points) > 1:
        owners = " and ".join(_distribution(point) for point in points)
        raise BackendUnavailable(
            f"backend {name!r} is claimed by {owners}. Uninstall all but one: "
            f"python3 -m pip uninstall {_pip_name(points[-1])}"
        )
    (point,) = points
    owner = _distribution(point)
    try:
        backend = point.load()
    except Exception as reason:
        raise BackendUnavailable(
            f"backend {name!r} of {owner} is installed but failed to import: {type(reason).__name__}: {reason}. "
            f"Reinstall it: python3 -m pip install --force-reinstall {_pip_name(point)}"
        ) from reason
    revision = getattr(backend, "spec_revision", None)
    if revision is not None and revision != SPEC_REVISION:
        raise BackendUnavailable(
            f"backend {name!r} of {owner} implements spec revision {revision}, this la-core is revision "
            f"{SPEC_REVISION}. Install matching versions: python3 -m pip install --upgrade la-core "
            f"{_pip_name(point)}"
        )
    if not isinstance(backend, Backend):
        missing = [part for part in ("name", "spec_revision", "capabilities", "refusal") if not hasattr(backend, part)]
        raise BackendUnavailable(
            f"backend {name!r} of {owner} is not a backend: {point.value} lacks {', '.join(missing) or 'decode'}. "
            "It must follow la_core.backends.backend_contract.Backend."
        )
    if backend.name != name:
        raise BackendUnavailable(
            f"backend {name!r} of {owner} calls itself {backend.name!r}. The entry point's name must be the "
            "backend's name."
        )
    return backend
