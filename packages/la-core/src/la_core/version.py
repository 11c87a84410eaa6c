"""Version of the distribution and revision of the contract that backends implement."""

__version__ = "0.1.0"

SPEC_REVISION = 1
"""Raised by one whenever a backend written for the previous contract could be wrong under this one."""
