"""The Triton backend of Lightning Attention: one kernel for CUDA GPUs, and for CPU tensors under the interpreter."""

from la_triton.version import __version__

__all__ = ["__version__"]
