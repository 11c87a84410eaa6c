"""Measures the backends of la-core: never decides what is correct, asks `la_core.conformance` first."""

from la_bench.version import __version__

__all__ = ["__version__"]
