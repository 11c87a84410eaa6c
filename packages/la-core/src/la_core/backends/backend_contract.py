"""What an implementation must look like. A backend is one object behind one entry point."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch

from la_core.backends.capabilities import Capabilities
from la_core.spec.decode_problem import DecodeProblem
from la_core.spec.kv_window import KVWindow
from la_core.spec.window_problem import WindowProblem


@runtime_checkable
class Backend(Protocol):
    """The object that an entry point of the group `la_core.backends` names.

    The entry point's name is the backend's name. Importing its module must touch no GPU and start no compiler.
    """

    @property
    def name(self) -> str:
        """The name users pass as `backend=`."""

    @property
    def spec_revision(self) -> int:
        """The :data:`la_core.SPEC_REVISION` the backend was written for."""

    @property
    def capabilities(self) -> Capabilities:
        """What it declares to run."""

    def refusal(self, problem: DecodeProblem | WindowProblem) -> str | None:
        """Why this backend will not run a legal call, as a sentence without its own name; None if it will.

        Pure: no tensors, no GPU call, the same answer each time. An exception raised here is a bug and propagates.
        A `WindowProblem` comes only to a backend that names its `op` in `capabilities.ops`.
        """

    def decode(
        self,
        problem: DecodeProblem,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        s: torch.Tensor,
        s_offsets: torch.Tensor,
        decay_scales: torch.Tensor,
        softmax_scale: float,
        out: torch.Tensor,
    ) -> None:
        """Run one checked call: write `out` and the states that `s_offsets` names.

        `la_core` has checked every argument and `problem` holds their facts: `B >= 1`, and `refusal(problem)` was
        None. The same `problem` object comes back for calls with the same facts, so it may key a cache by identity.
        Values of `s_offsets` are unchecked on a GPU: negative and `>= P` both mean padding.
        """


class DirectBackend(Protocol):
    """What a backend may have beside :meth:`Backend.decode`, for less time from Python.

    It is looked up by name: a subclass that changes `decode` must change or remove it too.
    """

    def direct_decode(self, problem: DecodeProblem, extents: tuple[int, ...]) -> Callable[..., bool] | None:
        """A function for calls that have the facts of `problem`, or None. Asked for when the first of them has run, for
        tensors on a GPU and `B >= 1`.

        The function takes `(q, k, v, s, s_offsets, decay_scales, out, softmax_scale)`, positionally. Facts are checked,
        memory is not: of each tensor, in that order, `extents` says how many bytes there are from its first element to
        its last. Where those of `s` or of `out` meet those of another tensor, and for any reason of its own, the
        function answers False and has done nothing: `la_core` then goes the whole way. Otherwise it does what `decode`
        does, on the current stream and from any thread, and answers True.
        """


class WindowBackend(Protocol):
    """The methods of a backend for the operators on a window: those that its `capabilities.ops` names.

    They are looked up by name, so that a backend may lack some. `la_core` has checked every argument as for
    :meth:`Backend.decode`; a problem with `B == 0` never comes. Values on a GPU are unchecked: an offset outside of
    0 ... P-1 means padding, `start` is taken modulo `N`, and `length`, `draft_lengths` and `accepted` are limited.
    """

    def decode_window(
        self,
        problem: WindowProblem,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        s: torch.Tensor,
        s_offsets: torch.Tensor,
        decay_scales: torch.Tensor,
        window: KVWindow,
        softmax_scale: float,
        out: torch.Tensor,
    ) -> None:
        """Write `out`, and each row's token: to the window, or with a full window's to the state."""

    def verify(
        self,
        problem: WindowProblem,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        s: torch.Tensor,
        s_offsets: torch.Tensor,
        decay_scales: torch.Tensor,
        window: KVWindow,
        draft_lengths: torch.Tensor | None,
        softmax_scale: float,
        out: torch.Tensor,
    ) -> None:
        """Write `out` and the drafts' places in the window. `draft_lengths` None means `T` for every row."""

    def commit(
        self,
        problem: WindowProblem,
        window: KVWindow,
        s: torch.Tensor,
        s_offsets: torch.Tensor,
        decay_scales: torch.Tensor,
        accepted: torch.Tensor | int,
        room: int | None,
    ) -> None:
        """Write the states: fold (`accepted` 0), commit, and commit_layers (all tensors stacked).

        With `room`, only those of rows with `length + accepted + room > N`.
        """

    def advance(
        self,
        problem: WindowProblem,
        window: KVWindow,
        s_offsets: torch.Tensor,
        accepted: torch.Tensor | int,
        room: int | None,
        clear: bool,
    ) -> None:
        """Write the cursors: advance, or clear (`clear` True, `accepted` 0).

        With `room`, advance clears the rows that commit brings in with the same `room`, and clear no others.
        """
