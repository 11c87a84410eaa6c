"""Where `python -m la_cute.prebuild` puts libraries of kernels, and manifests; without them, empty.

A package of its own, so that the hash of la_cute's sources does not cover what was made of them.
"""
