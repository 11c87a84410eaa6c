"""Makes the module beside the tests known by its name: pytest imports each file by itself, off any path."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_NAME = "count_allocations"
_spec = importlib.util.spec_from_file_location(_NAME, Path(__file__).with_name(f"{_NAME}.py"))
assert _spec is not None
assert _spec.loader is not None
sys.modules[_NAME] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(sys.modules[_NAME])
