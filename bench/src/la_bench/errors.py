"""The one exception that is the user's to fix."""


class UsageError(Exception):
    """A wrong option: its sentence is printed as it is, and the program exits with status 2."""
