"""The CuTe DSL backend of Lightning Attention, for CUDA GPUs."""

from la_cute.version import __version__
from la_cute.warm_up import warmup

__all__ = ["__version__", "warmup"]
