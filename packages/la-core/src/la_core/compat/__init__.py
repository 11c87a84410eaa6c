"""Signatures of other libraries, for callers that were written against them."""
