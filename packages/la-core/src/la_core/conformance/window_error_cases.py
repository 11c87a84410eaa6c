"""Wrong calls of the window operators as data: what is wrong, and the very sentence; see `decode_error_cases`.

Each case changes a legal call with B = 2, P = 3, H = 4, G = 2, K = 64, V = 128, N = 4, T = 3 (and L = 2) in one place.
What a window operator shares with decode is judged by the same code, so only a few of those rules are repeated here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import la_core
from la_core.spec.kv_window import KVWindow
from la_core.spec.window_checks import COMMIT_AXES, COMMIT_LAYERS_AXES, VERIFY_AXES

Arguments = dict[str, Any]

OPERATORS = ("decode", "verify", "advance", "clear", "fold", "commit", "commit_layers")
"""The public functions that work on a window."""


@dataclass(frozen=True)
class WindowErrorCase:
    """One wrong call.

    Attributes
    ----------
    id
        Readable name.
    op
        The function of `la_core` that is called.
    change
        Turns the arguments of the legal call into the wrong ones, in place.
    sentence
        The message of the `SpecViolation`, to the letter; `{device}` stands for the tensors' device.
    """

    id: str
    op: str
    change: Callable[[Arguments], object]
    sentence: str


def legal_window_arguments(op: str, device: torch.device | str = "cpu") -> Arguments:
    """Keyword arguments of the legal call of `op` that the cases change."""
    random = torch.Generator().manual_seed(0)

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random).bfloat16().to(device)

    layers = (2,) if op == "commit_layers" else ()
    window = KVWindow(
        make(*layers, 3, 4, 2, 64),
        make(*layers, 3, 4, 4, 128),
        torch.tensor([3, 0, 1], dtype=torch.int32, device=device),
        torch.tensor([1, 4, 0], dtype=torch.int32, device=device),
    )
    offsets = {"s_offsets": torch.tensor([2, 0], dtype=torch.int32, device=device)}
    counts = torch.tensor([2, 1], dtype=torch.int32, device=device)
    if op == "advance":
        return {"window": window, **offsets, "accepted": counts}
    if op == "clear":
        return {"window": window, **offsets}
    pool = {
        "s": torch.randn(*layers, 12, 128, 64, generator=random).to(device),
        **offsets,
        "decay_scales": torch.rand(*layers, 4, generator=random).to(device),
        "window": window,
    }
    if op == "fold":
        return pool
    if op in ("commit", "commit_layers"):
        return {**pool, "accepted": counts}
    drafts = (3,) if op == "verify" else ()
    tokens = {
        "q": make(2, *drafts, 2, 64),
        "k": make(2, *drafts, 2, 64),
        "v": make(2, *drafts, 4, 128),
        "out": torch.zeros(2, *drafts, 4, 128, dtype=torch.bfloat16, device=device),
    }
    return {**tokens, **pool, **({"draft_lengths": counts} if op == "verify" else {})}


def call_window_operator(op: str, arguments: Arguments, **options: Any) -> Any:
    """Call the function of `la_core` named `op`."""
    return getattr(la_core, op)(**arguments, **options)


def _set(name: str, make: Callable[[Any], Any]) -> Callable[[Arguments], object]:
    """Change an argument, or with `window.k` a tensor of the window."""

    def change(arguments: Arguments) -> None:
        argument, _, field = name.partition(".")
        if field:
            window = arguments[argument]
            arguments[argument] = dataclasses.replace(window, **{field: make(getattr(window, field))})
        else:
            arguments[name] = make(arguments.get(name))

    return change


def _always(value: object) -> Callable[[Any], object]:
    return lambda _: value


def _values(name: str, *values: int) -> Callable[[Arguments], object]:
    return _set(name, lambda t: torch.tensor(values, dtype=t.dtype, device=t.device))


def _each(names: str, case: Callable[[str], WindowErrorCase]) -> list[WindowErrorCase]:
    return [case(name) for name in names.split()]


def _lay_into(first: str, second: str) -> Callable[[Arguments], object]:
    """Lay `second` into the memory of `first`."""

    def change(arguments: Arguments) -> None:
        argument, _, field = first.partition(".")
        source: torch.Tensor = getattr(arguments[argument], field) if field else arguments[argument]

        def inside(wanted: torch.Tensor) -> torch.Tensor:
            return source.view(-1).view(wanted.dtype)[: wanted.numel()].view(wanted.shape)

        _set(second, inside)(arguments)

    return change


WINDOW_ERROR_CASES: tuple[WindowErrorCase, ...] = (
    # What is no window, or none of tensors.
    *_each(
        " ".join(OPERATORS[1:]),
        lambda op: WindowErrorCase(
            f"{op}-window-is-a-tuple",
            op,
            _set("window", lambda w: w.tensors()),
            f"{op}: window must be a la_core.KVWindow; got a tuple. "
            "Pass KVWindow(k, v, start, length), or KVWindow.allocate(...).",
        ),
    ),
    WindowErrorCase(
        "decode-window-is-a-list",
        "decode",
        _set("window", lambda w: [w.k, w.v]),
        "decode: window must be a la_core.KVWindow; got a list. "
        "Pass KVWindow(k, v, start, length), or KVWindow.allocate(...).",
    ),
    WindowErrorCase(
        "verify-window-is-none",
        "verify",
        _set("window", lambda w: None),
        "verify: window must be a la_core.KVWindow; got None. "
        "Pass KVWindow(k, v, start, length), or KVWindow.allocate(...).",
    ),
    *_each(
        "window.k window.v window.start window.length draft_lengths",
        lambda name: WindowErrorCase(
            f"verify-{name}-is-a-list",
            "verify",
            _set(name, lambda t: t.tolist()),
            f"verify: {name} must be a torch.Tensor {VERIFY_AXES[name]}; got a list. Pass a tensor.",
        ),
    ),
    *_each(
        "s s_offsets decay_scales",
        lambda name: WindowErrorCase(
            f"commit-{name}-is-a-list",
            "commit",
            _set(name, lambda t: t.tolist()),
            f"commit: {name} must be a torch.Tensor {COMMIT_AXES[name]}; got a list. Pass a tensor.",
        ),
    ),
    # Ranks.
    WindowErrorCase(
        "verify-q-is-3d",
        "verify",
        _set("q", lambda t: t[:, 0]),
        "verify: q must be 4-D [B, T, G, K]; got 3-D (2, 2, 64). Pass a 4-D tensor or view.",
    ),
    *_each(
        "decode verify fold commit",
        lambda op: WindowErrorCase(
            f"{op}-window-is-stacked",
            op,
            _set("window.k", lambda t: torch.stack([t, t])),
            f"{op}: window.k must be 4-D [P, N, G, K]; got 5-D (2, 3, 4, 2, 64). "
            "Pass window.layer(l), the window of one layer.",
        ),
    ),
    WindowErrorCase(
        "commit_layers-window-is-of-one-layer",
        "commit_layers",
        _set("window.k", lambda t: t[0]),
        "commit_layers: window.k must be 5-D [L, P, N, G, K]; got 4-D (3, 4, 2, 64). Pass a 5-D tensor or view.",
    ),
    WindowErrorCase(
        "commit_layers-s-is-5d",
        "commit_layers",
        _set("s", lambda t: t.view(2, 3, 4, 128, 64)),
        "commit_layers: s must be 4-D [L, P*H, V, K]; got 5-D (2, 3, 4, 128, 64). Pass a 4-D tensor or view.",
    ),
    WindowErrorCase(
        "fold-s-is-4d",
        "fold",
        _set("s", lambda t: t.view(3, 4, 128, 64)),
        "fold: s must be 3-D [P*H, V, K]; got 4-D (3, 4, 128, 64). Pass s.view(12, 128, 64).",
    ),
    WindowErrorCase(
        "advance-window.k-is-3d",
        "advance",
        _set("window.k", lambda t: t.flatten(2)),
        "advance: window.k must be 4-D [P, N, G, K], or 5-D [L, P, N, G, K] for all layers; got 3-D (3, 4, 128). "
        "Pass the window of the other operators.",
    ),
    # Sizes.
    WindowErrorCase(
        "verify-more-drafts-than-places",
        "verify",
        lambda a: [_set(name, lambda t: t.repeat_interleave(2, 1))(a) for name in ("q", "k", "v", "out")],
        "verify: q [B, T, G, K] must have T from 1 to N = 4, the places of the window; got T = 6. "
        "Pass fewer drafts, or allocate a window of more places.",
    ),
    WindowErrorCase(
        "verify-no-drafts",
        "verify",
        lambda a: [_set(name, lambda t: t[:, :0])(a) for name in ("q", "k", "v", "out")],
        "verify: q [B, T, G, K] must have T from 1 to N = 4, the places of the window; got T = 0. "
        "Pass fewer drafts, or allocate a window of more places.",
    ),
    WindowErrorCase(
        "verify-v-of-other-T",
        "verify",
        _set("v", lambda t: t[:, :2]),
        "verify: v must be [B, T, H, V] = (2, 3, 4, 128), with the B and T of q; got (2, 2, 4, 128). "
        "Pass v of that shape.",
    ),
    *_each(
        "decode fold advance",
        lambda op: WindowErrorCase(
            f"{op}-window-of-65-places",
            op,
            _set("window.k", lambda t: t.new_zeros(3, 65, 2, 64)),
            f"{op}: window.k must have N from 1 to 64 places; got N = 65 in (3, 65, 2, 64). "
            "Allocate a window with KVWindow.allocate(...).",
        ),
    ),
    WindowErrorCase(
        "decode-window-without-places",
        "decode",
        _set("window.k", lambda t: t[:, :0]),
        "decode: window.k must have N from 1 to 64 places; got N = 0 in (3, 0, 2, 64). "
        "Allocate a window with KVWindow.allocate(...).",
    ),
    WindowErrorCase(
        "decode-window-of-another-pool",
        "decode",
        lambda a: a.update(window=KVWindow.allocate(P=5, N=4, H=4, G=2, K=64, V=128, device=a["q"].device)),
        "decode: window.k must have the P = 3 slots of s; got P = 5. Allocate the window for the same pool.",
    ),
    WindowErrorCase(
        "decode-window.k-of-other-heads",
        "decode",
        _set("window.k", lambda t: t[:, :, :1]),
        "decode: window.k must be [P, N, G, K] = (3, 4, 2, 64), with the heads and sizes of q; got (3, 4, 1, 64). "
        "Pass window.k of that shape.",
    ),
    WindowErrorCase(
        "verify-window.v-of-other-N",
        "verify",
        _set("window.v", lambda t: t[:, :3]),
        "verify: window.v must be [P, N, H, V] = (3, 4, 4, 128), with the P and N of window.k; got (3, 3, 4, 128). "
        "Pass window.v of that shape.",
    ),
    WindowErrorCase(
        "fold-heads-that-do-not-divide",
        "fold",
        _set("window.k", lambda t: t.new_zeros(3, 4, 3, 64)),
        "fold: the H heads of window.v must be a multiple of the G heads of window.k; got H = 4, G = 3. "
        "Head h of v uses head h // (H // G) of q and k.",
    ),
    WindowErrorCase(
        "commit-s-in-the-other-layout",
        "commit",
        _set("s", lambda t: t.transpose(1, 2)),
        "commit: s must be [P*H, V, K] = (12, 128, 64), with the V of window.v and the K of window.k; "
        "got (12, 64, 128). Pass s.transpose(1, 2): its strides say how it is stored.",
    ),
    WindowErrorCase(
        "commit_layers-s-of-other-P",
        "commit_layers",
        _set("s", lambda t: t[:, :8]),
        "commit_layers: s must be [L, P*H, V, K] = (2, 12, 128, 64), with the sizes of window.k and window.v; "
        "got (2, 8, 128, 64). Pass s of that shape.",
    ),
    WindowErrorCase(
        "commit_layers-decay_scales-of-one-layer",
        "commit_layers",
        _set("decay_scales", lambda t: t[:1]),
        "commit_layers: decay_scales must be [L, H] = (2, 4), one slope for each head of window.v, of each layer; "
        "got (1, 4). Pass decay_scales of that shape.",
    ),
    *_each(
        "window.start window.length",
        lambda name: WindowErrorCase(
            f"advance-{name}-of-other-P",
            "advance",
            _set(name, lambda t: t[:2]),
            f"advance: {name} must be [P] = (3), one cursor for each slot of window.k; got (2). "
            f"Pass {name} of that shape.",
        ),
    ),
    WindowErrorCase(
        "verify-draft_lengths-of-other-B",
        "verify",
        _set("draft_lengths", lambda t: t[:1]),
        "verify: draft_lengths must be [B] = (2), one count for each row of q; got (1). "
        "Pass draft_lengths of that shape.",
    ),
    WindowErrorCase(
        "commit-accepted-of-other-B",
        "commit",
        _set("accepted", lambda t: t[:1]),
        "commit: accepted must be [B] = (2), one count for each row of s_offsets; got (1). "
        "Pass accepted of that shape.",
    ),
    # Dtypes.
    WindowErrorCase(
        "decode-window-of-another-dtype",
        "decode",
        lambda a: [_set(name, lambda t: t.half())(a) for name in ("window.k", "window.v")],
        "decode: window.k must have the dtype of q, bfloat16, or float32; got float16. "
        "Allocate the window in the dtype of q, k and v.",
    ),
    WindowErrorCase(
        "decode-window-of-16-bits-beside-float32",
        "decode",
        lambda a: [_set(name, lambda t: t.float())(a) for name in ("q", "k", "v")],
        "decode: window.k must have the dtype of q, float32; got bfloat16. "
        "Allocate the window in the dtype of q, k and v.",
    ),
    WindowErrorCase(
        "fold-window.k-is-float64",
        "fold",
        _set("window.k", lambda t: t.double()),
        "fold: window.k must be bfloat16, float16 or float32; got float64. "
        "Allocate the window in the dtype of q, k and v.",
    ),
    WindowErrorCase(
        "fold-window.v-of-another-dtype",
        "fold",
        _set("window.v", lambda t: t.float()),
        "fold: window.v must have the dtype of window.k, bfloat16; got float32. "
        "Allocate both in the dtype of q, k and v.",
    ),
    *_each(
        "window.start window.length",
        lambda name: WindowErrorCase(
            f"clear-{name}-is-int64",
            "clear",
            _set(name, lambda t: t.long()),
            f"clear: {name} must be int32; got int64. Allocate {name} as int32.",
        ),
    ),
    WindowErrorCase(
        "advance-accepted-is-bool",
        "advance",
        _set("accepted", lambda t: t.bool()),
        "advance: accepted must be int32 or int64; got bool. Pass accepted.to(torch.int32).",
    ),
    # Devices.
    WindowErrorCase(
        "decode-window.length-on-another-device",
        "decode",
        _set("window.length", lambda t: t.to("meta")),
        "decode: window.length must be on {device}, the device of q; got meta. Allocate window.length on {device}; "
        "a copy would lose the update.",
    ),
    WindowErrorCase(
        "commit-s_offsets-on-another-device",
        "commit",
        _set("s_offsets", lambda t: t.to("meta")),
        "commit: s_offsets must be on {device}, the device of window.k; got meta. Pass s_offsets.to('{device}').",
    ),
    # Strides.
    WindowErrorCase(
        "verify-window.k-last-stride-2",
        "verify",
        _set("window.k", lambda t: t.repeat_interleave(2, -1)[..., ::2]),
        "verify: the last dimension of window.k [P, N, G, K] must have stride 1; got strides (1024, 256, 128, 2). "
        "Allocate window.k so; a copy would lose the update.",
    ),
    WindowErrorCase(
        "decode-window.v-is-expanded",
        "decode",
        _set("window.v", lambda t: t[:, :1].expand(-1, 4, -1, -1)),
        "decode: window.v [P, N, H, V] must have memory of its own for every element; got shape (3, 4, 4, 128) with "
        "strides (2048, 0, 128, 1), which overlap. Pass a tensor that is not an expanded view.",
    ),
    WindowErrorCase(
        "commit_layers-s-is-expanded",
        "commit_layers",
        _set("s", lambda t: t[:1].expand(2, -1, -1, -1)),
        f"commit_layers: s {COMMIT_LAYERS_AXES['s']} must have memory of its own for every element; got shape "
        "(2, 12, 128, 64) with strides (0, 8192, 64, 1), which overlap. Pass a tensor that is not an expanded view.",
    ),
    WindowErrorCase(
        "advance-window.start-with-gaps",
        "advance",
        _set("window.start", lambda t: t.repeat_interleave(2)[::2]),
        "advance: window.start [P] must be contiguous; got strides (2). Allocate window.start so; "
        "a copy would lose the update.",
    ),
    # Memory.
    *(
        WindowErrorCase(
            f"{op}-{second}-inside-{first}",
            op,
            _lay_into(first, second),
            f"{op}: {first} is written and must not overlap {second}; got {first} and {second} sharing memory. "
            f"Pass {first} with memory of its own.",
        )
        for op, first, second in (
            ("decode", "window.k", "k"),
            ("decode", "s", "window.v"),
            ("decode", "out", "s_offsets"),
            ("verify", "window.k", "q"),
            ("verify", "window.v", "s_offsets"),
            ("fold", "s", "window.k"),
            ("commit_layers", "s", "window.v"),
            ("advance", "window.start", "window.length"),
            ("advance", "window.length", "accepted"),
            ("clear", "window.start", "s_offsets"),
        )
    ),
    # Gradients.
    *(
        WindowErrorCase(
            f"{op}-{name}-requires-grad",
            op,
            _set(name, lambda t: t.detach().clone().requires_grad_()),
            f"{op}: {name} must not require grad: the operator is for inference only; got requires_grad=True while "
            f"grad mode is on. Call under torch.no_grad() or pass {name}.detach().",
        )
        for op, name in (("decode", "window.k"), ("verify", "q"), ("fold", "s"), ("advance", "window.k"))
    ),
    # Numbers.
    *(
        WindowErrorCase(
            f"{op}-accepted-is-{value}",
            op,
            _set("accepted", _always(value)),
            f"{op}: accepted {rule}",
        )
        for op in ("advance", "commit", "commit_layers")
        for value, rule in (
            (5, "must be from 0 to 4; got 5. N is the places of the window."),
            (-1, "must be from 0 to 4; got -1. N is the places of the window."),
            (1.0, "must be an int or a Tensor [B]; got a float. Pass a number from 0 to 4."),
            (True, "must be an int or a Tensor [B]; got a bool. Pass a number from 0 to 4."),
            (None, "must be an int or a Tensor [B]; got a NoneType. Pass a number from 0 to 4."),
        )
    ),
    *(
        WindowErrorCase(f"{op}-room-is-{value}", op, _set("room", _always(value)), f"{op}: room {rule}")
        for op in ("fold", "clear", "commit", "commit_layers", "advance")
        for value, rule in (
            (0, "must be from 1 to 4; got 0. N is the places of the window."),
            (5, "must be from 1 to 4; got 5. N is the places of the window."),
            (2.0, "must be an int or None; got a float. Pass a number from 1 to 4."),
        )
    ),
    # Options.
    *_each(
        "decode verify",
        lambda op: WindowErrorCase(
            f"{op}-softmax_scale-is-a-tensor",
            op,
            _set("softmax_scale", lambda _: torch.tensor(0.5)),
            f"{op}: softmax_scale must be a real number or None; got a Tensor. "
            "Pass a Python float, for example softmax_scale=0.125.",
        ),
    ),
    *_each(
        " ".join(OPERATORS),
        lambda op: WindowErrorCase(
            f"{op}-check_offsets-is-a-number",
            op,
            _set("check_offsets", lambda _: 1),
            f"{op}: check_offsets must be True, False or None; got 1. Leave check_offsets out for the default.",
        ),
    ),
)

WINDOW_VALUE_ERROR_CASES: tuple[WindowErrorCase, ...] = (
    *_each(
        " ".join(OPERATORS),
        lambda op: WindowErrorCase(
            f"{op}-offset-is-P",
            op,
            _values("s_offsets", 0, 3),
            f"{op}: s_offsets must be negative (padding) or below P = 3; got slot 3 in row 1. "
            "Pass the slot that each row owns.",
        ),
    ),
    *_each(
        " ".join(OPERATORS),
        lambda op: WindowErrorCase(
            f"{op}-offset-twice",
            op,
            _values("s_offsets", 2, 2),
            f"{op}: s_offsets must name each slot at most once; got slot 2 in rows 0 and 1. "
            "Give every row its own slot; padding rows are negative.",
        ),
    ),
    *_each(
        "decode verify advance fold commit commit_layers",
        lambda op: WindowErrorCase(
            f"{op}-start-outside",
            op,
            _values("window.start", 4, 9, 0),
            f"{op}: window.start must be from 0 to N - 1 = 3; got 4 in slot 0 of row 1. "
            "Only advance and clear write cursors; those of a new window are zero.",
        ),
    ),
    *_each(
        "decode verify advance fold commit commit_layers",
        lambda op: WindowErrorCase(
            f"{op}-length-outside",
            op,
            _values("window.length", 0, 9, -1),
            f"{op}: window.length must be from 0 to N = 4; got -1 in slot 2 of row 0. "
            "Only advance and clear write cursors; those of a new window are zero.",
        ),
    ),
    WindowErrorCase(
        "verify-more-drafts-than-T",
        "verify",
        _values("draft_lengths", 1, 4),
        "verify: draft_lengths must be from 0 to T = 3; got 4 in row 1. Pass the number of drafts of each row.",
    ),
    WindowErrorCase(
        "verify-no-room",
        "verify",
        lambda a: [_values("window.length", 3, 0, 2)(a), a.pop("draft_lengths")],
        "verify: pending tokens and drafts of a row must fit the N = 4 places of the window; "
        "got 2 pending tokens and 3 drafts in row 0, slot 2. "
        "Make room before: fold(..., room=T), then clear(..., room=T).",
    ),
    *_each(
        "advance commit commit_layers",
        lambda op: WindowErrorCase(
            f"{op}-more-accepted-than-places",
            op,
            _values("accepted", 4, 4),
            f"{op}: accepted must be from 0 to the number of places behind the pending tokens; "
            "got 4 in row 1, with 1 of N = 4 places pending. Pass at most the drafts that verify wrote.",
        ),
    ),
    WindowErrorCase(
        "advance-two-accepted-in-a-full-window",
        "advance",
        lambda a: [_values("window.length", 4, 0, 4)(a), _values("accepted", 1, 2)(a)],
        "advance: accepted must be from 0 to the number of places behind the pending tokens; "
        "got 2 in row 1, with 4 of N = 4 places pending. Pass at most the drafts that verify wrote.",
    ),
)
"""Wrong values: always refused on a CPU, on a GPU only with `check_offsets=True`."""
