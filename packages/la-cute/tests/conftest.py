"""Makes the modules beside the tests known by their names: pytest imports each file by itself, off any path."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

# numpy comes with the compiler; where neither is, the tests that need them say so.
_WITH_NUMPY = ("ptx_arithmetic", "ptx_emulator", "emulated_kernel", "emulated_window")
_NAMES = ("native_code", *(_WITH_NUMPY if importlib.util.find_spec("numpy") else ()))
for _name in _NAMES:
    _spec = importlib.util.spec_from_file_location(_name, Path(__file__).with_name(f"{_name}.py"))
    assert _spec is not None
    assert _spec.loader is not None
    sys.modules[_name] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[_name])
