"""Whether native code can be linked here, as `la_cute.prebuild` links it."""

from __future__ import annotations

import platform
import shutil
import sys

import pytest

from la_cute.prebuild import PYTHON_HEADER

LINKED = (
    sys.platform == "linux"
    and platform.machine() == "x86_64"
    and shutil.which("gcc") is not None
    and PYTHON_HEADER.exists()
)

NOT_LINKED = "not run: native code is linked by gcc, on Linux for x86-64, with Python's header files"

linked = pytest.mark.skipif(not LINKED, reason=NOT_LINKED)
