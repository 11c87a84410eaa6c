"""The CuTe DSL backend of Lightning Attention, for CUDA GPUs."""

from la_cute.version import __version__

__all__ = ["__version__"]
