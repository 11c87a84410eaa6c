"""Whether native code can be linked here, as `la_cute.prebuild` links it."""

from __future__ import annotations

import platform
import shutil
import sys

import pytest

from la_cute.prebuild import PYTHON_HEADER

linked = pytest.mark.skipif(
    sys.platform != "linux"
    or platform.machine() != "x86_64"
    or shutil.which("gcc") is None
    or not PYTHON_HEADER.exists(),
    reason="not run: native code is linked by gcc, on Linux for x86-64, with Python's header files",
)
