"""The three exceptions of the library. Each has one meaning; see `docs/spec/lightning_decode.md`."""


class SpecViolation(ValueError):
    """The call breaks the contract: no backend may ever accept it. Raised before anything is written."""


class UnsupportedByBackend(NotImplementedError):
    """The call is legal, but the backend that was asked for (or every candidate) cannot run it."""


class BackendUnavailable(ImportError):
    """The backend is not installed, failed to import, clashes with another, or implements another contract."""
