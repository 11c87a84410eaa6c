"""The Triton backend of Lightning Attention: kernels for CUDA GPUs, and for CPU tensors under the interpreter."""

from la_triton.version import __version__

__all__ = ["__version__"]
