"""Loads one module of a package without importing the package around it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from la_bench.peers.peer import PeerUnavailable


def find_file(peer: str, path: Path | None, places: Sequence[str]) -> Path:
    """The file of the peer's module.

    Parameters
    ----------
    path
        The file itself, or a folder that holds it or the package; None looks where the packages are installed.
    places
        Where the module lies, from the folder of the package on, such as `package/ops/module.py`; the first that
        exists is taken.
    """
    if path is not None and path.is_file():
        return path
    roots = [path] if path is not None else _installed_roots(places)
    for root in roots:
        for place in (*places, *(Path(place).name for place in places)):
            if (root / place).is_file():
                return root / place
    packages = " or ".join(dict.fromkeys(place.split("/")[0] for place in places))
    where = f"{path} holds none of {', '.join(places)}" if path is not None else f"{packages} is not installed"
    raise PeerUnavailable(f"{where}. Pass --peer {peer}=PATH, a {Path(places[0]).name} or the folder of {packages}")


def load_file(peer: str, file: Path, stand_ins: Mapping[str, ModuleType]) -> ModuleType:
    """Execute a file as a module of its own, beside `stand_ins` for what it would import from its package."""
    name = f"la_bench_peer_{peer}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise PeerUnavailable(f"{file} is not a Python module")
    module = importlib.util.module_from_spec(spec)
    with _installed(stand_ins):
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as reason:
            del sys.modules[name]
            raise PeerUnavailable(_why(file, reason)) from reason
    return module


def load_from_package(root: Path, module: str, bare: Sequence[str]) -> ModuleType:
    """Import `module` from the folder `root`, with the packages in `bare` empty: their `__init__` does not run."""
    added = [name for name in bare if name not in sys.modules]
    for name in added:
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(root.joinpath(*name.split(".")))]
        sys.modules[name] = importlib.util.module_from_spec(spec)
        vars(sys.modules[name])["__version__"] = "0"
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as reason:
        for name in added:
            del sys.modules[name]
        raise PeerUnavailable(_why(root.joinpath(*module.split(".")), reason)) from reason


def required(module: ModuleType, name: str) -> Callable[..., Any]:
    """The module's function or class of that name."""
    found: Callable[..., Any] | None = getattr(module, name, None)
    if found is None:
        raise PeerUnavailable(f"{module.__file__} has no {name}: another version, or another file")
    return found


def module_with(name: str, **contents: object) -> ModuleType:
    """A module made up of what is given."""
    module = ModuleType(name)
    vars(module).update(contents)
    return module


def _why(file: Path, reason: Exception | SystemExit) -> str:
    return f"{file} cannot be imported: {type(reason).__name__}: {reason}"


def _installed_roots(places: Sequence[str]) -> Iterator[Path]:
    for package in dict.fromkeys(place.split("/")[0] for place in places):
        spec = importlib.util.find_spec(package)
        for location in (spec.submodule_search_locations if spec else None) or ():
            yield Path(location).parent


@contextmanager
def _installed(modules: Mapping[str, ModuleType]) -> Iterator[None]:
    """The modules are importable inside the block, and what was there before is again behind it."""
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module
