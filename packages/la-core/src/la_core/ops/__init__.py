"""The operators users call, one file each: check, choose a backend, run."""
