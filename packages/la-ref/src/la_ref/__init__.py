"""The reference backend of Lightning Attention: plain torch, every device, dtype, layout and size of the contract."""

from la_ref.version import __version__

__all__ = ["__version__"]
