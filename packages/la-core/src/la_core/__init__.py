"""Lightning Attention over a state pool: the operators, their contract, and the choice of a backend.

Importing this package imports no backend and touches no GPU. It reads which backends are installed: that takes some
milliseconds, for which the first call of a process need not wait.
"""

from la_core.backends.choose_backend import Choice, use_backend, use_overlap
from la_core.backends.discover_backends import BackendInfo, installed_names, list_backends
from la_core.decay_slopes import decay_slopes
from la_core.ops.commit import commit, commit_layers, fold
from la_core.ops.decode import decode, explain_choice
from la_core.ops.verify import verify
from la_core.ops.window_cursors import advance, clear
from la_core.spec.decode_checks import check_decode as decode_problem
from la_core.spec.decode_problem import DecodeProblem
from la_core.spec.errors import BackendUnavailable, SpecViolation, UnsupportedByBackend
from la_core.spec.kv_window import KVWindow
from la_core.spec.window_checks import check_window_call as window_problem
from la_core.spec.window_problem import WindowProblem
from la_core.version import SPEC_REVISION, __version__

__all__ = [
    "SPEC_REVISION",
    "BackendInfo",
    "BackendUnavailable",
    "Choice",
    "DecodeProblem",
    "KVWindow",
    "SpecViolation",
    "UnsupportedByBackend",
    "WindowProblem",
    "__version__",
    "advance",
    "clear",
    "commit",
    "commit_layers",
    "decay_slopes",
    "decode",
    "decode_problem",
    "explain_choice",
    "fold",
    "list_backends",
    "use_backend",
    "use_overlap",
    "verify",
    "window_problem",
]

installed_names()
