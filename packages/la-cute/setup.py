"""The platform of the wheel. All else stands in pyproject.toml.

With kernels that were built ahead of time it is for Linux on x86-64, and for a glibc that their libraries can use;
without them it is for any.
"""

import json
from pathlib import Path

from setuptools import setup

MANIFESTS = sorted(Path(__file__).parent.glob("src/la_cute_kernels/*.json"))
GLIBC = max((json.loads(path.read_text(encoding="utf-8"))["glibc"] for path in MANIFESTS), default=None)

setup(options={"bdist_wheel": {"plat_name": f"manylinux_{GLIBC[0]}_{GLIBC[1]}_x86_64"}} if GLIBC else {})
