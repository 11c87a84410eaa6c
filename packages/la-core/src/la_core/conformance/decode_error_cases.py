"""Wrong decode calls as data: what is wrong, which exception, and the very sentence.

Each case changes a legal call with B = 2, P = 3, H = 4, G = 2, K = 64, V = 128 in one place. The sentences are part of
the contract: users search for them, and every backend must give the same one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from la_core.spec.argument_checks import WRITTEN
from la_core.spec.decode_checks import AXES

Arguments = dict[str, Any]


@dataclass(frozen=True)
class DecodeErrorCase:
    """One wrong call.

    Attributes
    ----------
    id
        Readable name.
    change
        Turns the arguments of the legal call into the wrong ones, in place.
    sentence
        The message of the `SpecViolation`, to the letter; `{device}` stands for the tensors' device.
    """

    id: str
    change: Callable[[Arguments], object]
    sentence: str


def legal_arguments(device: torch.device | str = "cpu") -> Arguments:
    """Keyword arguments of the legal call that the cases change."""
    random = torch.Generator().manual_seed(0)
    return {
        "q": torch.randn(2, 2, 64, generator=random).bfloat16().to(device),
        "k": torch.randn(2, 2, 64, generator=random).bfloat16().to(device),
        "v": torch.randn(2, 4, 128, generator=random).bfloat16().to(device),
        "s": torch.randn(12, 128, 64, generator=random).to(device),
        "s_offsets": torch.tensor([2, 0], dtype=torch.int32, device=device),
        "decay_scales": torch.linspace(0.1, 0.4, 4).to(device),
        "out": torch.zeros(2, 4, 128, dtype=torch.bfloat16, device=device),
    }


def _set(name: str, make: Callable[[Any], Any]) -> Callable[[Arguments], object]:
    def change(arguments: Arguments) -> None:
        arguments[name] = make(arguments.get(name))

    return change


def _set_offsets(*values: int) -> Callable[[Arguments], object]:
    return _set("s_offsets", lambda t: torch.tensor(values, dtype=torch.int32, device=t.device))


def _each(names: str, case: Callable[[str], DecodeErrorCase]) -> list[DecodeErrorCase]:
    return [case(name) for name in names.split()]


def _share(first: str, second: str) -> Callable[[Arguments], object]:
    """Lay `second` into the memory of `first`, which is written."""

    def change(arguments: Arguments) -> None:
        wanted = arguments[second]
        source = arguments[first]
        arguments[second] = source.view(-1).view(wanted.dtype)[: wanted.numel()].view(wanted.shape)

    return change


def _interleave(arguments: Arguments) -> None:
    """Q and out as slices of one buffer that overlap in the last element of each row."""
    fused = torch.zeros(2, 128 + 512 - 1, dtype=torch.bfloat16, device=arguments["q"].device)
    arguments["q"] = torch.unflatten(fused[:, :128], 1, (2, 64))
    arguments["out"] = torch.unflatten(fused[:, 127:], 1, (4, 128))


DECODE_ERROR_CASES: tuple[DecodeErrorCase, ...] = (
    # What is no tensor, or none whose memory can be used.
    *_each(
        "q k v s s_offsets decay_scales out",
        lambda name: DecodeErrorCase(
            f"{name}-is-a-list",
            _set(name, lambda t: t.tolist()),
            f"decode: {name} must be a torch.Tensor {AXES[name]}; got a list. Pass a tensor.",
        ),
    ),
    *_each(
        "q k v s s_offsets decay_scales",
        lambda name: DecodeErrorCase(
            f"{name}-is-none",
            _set(name, lambda t: None),
            f"decode: {name} must be a torch.Tensor {AXES[name]}; got None. Pass a tensor.",
        ),
    ),
    DecodeErrorCase(
        "v-is-sparse",
        _set("v", lambda t: t.to_sparse()),
        "decode: v must be a dense tensor [B, H, V]; got layout sparse_coo. Pass v.to_dense().",
    ),
    DecodeErrorCase(
        "q-is-lazily-negated",
        _set("q", torch._neg_view),
        "decode: q must hold its own values; got a lazily negated view, whose memory has the opposite sign. "
        "Pass q.resolve_neg().",
    ),
    # Ranks.
    DecodeErrorCase(
        "s-is-4d",
        _set("s", lambda t: t.view(3, 4, 128, 64)),
        "decode: s must be 3-D [P*H, V, K]; got 4-D (3, 4, 128, 64). Pass s.view(12, 128, 64).",
    ),
    DecodeErrorCase(
        "s-is-4d-with-padded-slots",
        _set("s", lambda t: t.new_zeros(3, 5, 128, 64)[:, :4]),
        "decode: s must be 3-D [P*H, V, K]; got 4-D (3, 4, 128, 64). No view flattens strides (40960, 8192, 64, 1), "
        "and a copy would lose the update: allocate the pool so that slots and heads have one common stride.",
    ),
    DecodeErrorCase(
        "s-is-2d",
        _set("s", lambda t: t.flatten(1)),
        "decode: s must be 3-D [P*H, V, K]; got 2-D (12, 8192). Pass the pool as [P*H, V, K].",
    ),
    DecodeErrorCase(
        "out-is-4d",
        _set("out", lambda t: t.view(2, 1, 4, 128)),
        "decode: out must be 3-D [B, H, V]; got 4-D (2, 1, 4, 128). Pass a 3-D tensor or view.",
    ),
    DecodeErrorCase(
        "q-is-2d",
        _set("q", lambda t: t.flatten(1)),
        "decode: q must be 3-D [B, G, K]; got 2-D (2, 128). Pass a 3-D tensor or view.",
    ),
    DecodeErrorCase(
        "v-is-4d",
        _set("v", lambda t: t[:, None]),
        "decode: v must be 3-D [B, H, V]; got 4-D (2, 1, 4, 128). Pass a 3-D tensor or view.",
    ),
    DecodeErrorCase(
        "s_offsets-is-2d",
        _set("s_offsets", lambda t: t[:, None]),
        "decode: s_offsets must be 1-D [B]; got 2-D (2, 1). Pass a 1-D tensor or view.",
    ),
    DecodeErrorCase(
        "decay_scales-is-4d",
        _set("decay_scales", lambda t: t.view(1, 4, 1, 1)),
        "decode: decay_scales must be 1-D [H]; got 4-D (1, 4, 1, 1). Pass a 1-D tensor or view.",
    ),
    # Sizes.
    DecodeErrorCase(
        "no-heads",
        _set("v", lambda t: t[:, :0]),
        "decode: v [B, H, V] must have H >= 1; got (2, 0, 128). Only B and P may be 0.",
    ),
    DecodeErrorCase(
        "no-keys",
        _set("q", lambda t: t[:, :, :0]),
        "decode: q [B, G, K] must have K >= 1; got (2, 2, 0). Only B and P may be 0.",
    ),
    DecodeErrorCase(
        "k-of-other-heads",
        _set("k", lambda t: t[:, :1]),
        "decode: k must be [B, G, K] = (2, 2, 64), the shape of q; got (2, 1, 64). Pass k of that shape.",
    ),
    DecodeErrorCase(
        "v-of-other-rows",
        _set("v", lambda t: t[:1]),
        "decode: v must be [B, H, V] = (2, 4, 128), with the B of q; got (1, 4, 128). Pass v of that shape.",
    ),
    DecodeErrorCase(
        "heads-not-grouped",
        _set("v", lambda t: t[:, :3]),
        "decode: the H heads of v must be a multiple of the G heads of q and k; got H = 3, G = 2. "
        "Head h of v uses head h // (H // G) of q and k.",
    ),
    DecodeErrorCase(
        "s-of-broken-slots",
        _set("s", lambda t: t[:10]),
        "decode: s.shape[0] must be P*H, divisible by the H = 4 heads of v; got (10, 128, 64). "
        "Pass a pool of whole slots, 4 rows each.",
    ),
    DecodeErrorCase(
        "s-transposed",
        _set("s", lambda t: t.transpose(1, 2)),
        "decode: s must be [P*H, V, K] = (12, 128, 64), with the V of v and the K of q; got (12, 64, 128). "
        "Pass s.transpose(1, 2): its strides say how it is stored.",
    ),
    DecodeErrorCase(
        "s_offsets-of-other-rows",
        _set_offsets(0, 1, 2),
        "decode: s_offsets must be [B] = (2), one slot for each row of q; got (3). Pass s_offsets of that shape.",
    ),
    *(
        DecodeErrorCase(
            f"decay_scales-of-length-{n}",
            _set("decay_scales", lambda t, n=n: t.new_ones(n)),  # type: ignore[misc]
            f"decode: decay_scales must be [H] = (4), one slope for each head of v; got ({n}). "
            "Pass decay_scales of that shape.",
        )
        for n in (1, 3, 5)
    ),
    DecodeErrorCase(
        "out-of-other-shape",
        _set("out", lambda t: t.transpose(1, 2)),
        "decode: out must be [B, H, V] = (2, 4, 128), the shape of v; got (2, 128, 4). Pass out of that shape.",
    ),
    # Dtypes.
    DecodeErrorCase(
        "q-is-double",
        _set("q", lambda t: t.double()),
        "decode: q must be bfloat16, float16 or float32; got float64. Convert q, k and v to one of them.",
    ),
    *_each(
        "k v",
        lambda name: DecodeErrorCase(
            f"{name}-of-other-dtype",
            _set(name, lambda t: t.float()),
            f"decode: {name} must have the dtype of q, bfloat16; got float32. Pass {name}.to(torch.bfloat16).",
        ),
    ),
    DecodeErrorCase(
        "s-is-double",
        _set("s", lambda t: t.double()),
        "decode: s must be float32, bfloat16 or float16; got float64. Allocate the pool in one of them.",
    ),
    DecodeErrorCase(
        "s_offsets-are-floats",
        _set("s_offsets", lambda t: t.float()),
        "decode: s_offsets must be int32 or int64; got float32. Pass s_offsets.to(torch.int32).",
    ),
    DecodeErrorCase(
        "decay_scales-are-bf16",
        _set("decay_scales", lambda t: t.bfloat16()),
        "decode: decay_scales must be float32; got bfloat16. Pass decay_scales.float(), computed in float32 from the "
        "start: a slope rounded to 16 bits is another model.",
    ),
    DecodeErrorCase(
        "out-is-double",
        _set("out", lambda t: t.double()),
        "decode: out must be bfloat16, float16 or float32; got float64. Allocate out in one of them.",
    ),
    # Devices.
    *_each(
        "k v s s_offsets decay_scales out",
        lambda name: DecodeErrorCase(
            f"{name}-on-another-device",
            _set(name, lambda t: t.to("meta")),
            f"decode: {name} must be on {{device}}, the device of q; got meta. "
            + (
                f"Allocate {name} on {{device}}; a copy would lose the update."
                if name in WRITTEN
                else f"Pass {name}.to('{{device}}')."
            ),
        ),
    ),
    # Strides.
    *_each(
        "q k v out",
        lambda name: DecodeErrorCase(
            f"{name}-last-stride-2",
            _set(name, lambda t: t.repeat_interleave(2, dim=-1)[..., ::2]),
            f"decode: the last dimension of {name} {AXES[name]} must have stride 1; "
            f"got strides {'(256, 128, 2)' if name in ('q', 'k') else '(1024, 256, 2)'}. "
            + (
                "Allocate out so; a copy would lose the update."
                if name == "out"
                else f"Pass {name}.contiguous(); the other strides are free."
            ),
        ),
    ),
    DecodeErrorCase(
        "s_offsets-strided",
        _set("s_offsets", lambda t: t.repeat_interleave(2)[::2]),
        "decode: s_offsets [B] must be contiguous; got strides (2). Pass s_offsets.contiguous().",
    ),
    DecodeErrorCase(
        "decay_scales-expanded",
        _set("decay_scales", lambda t: t[:1].expand(4)),
        "decode: decay_scales [H] must be contiguous; got strides (0). Pass decay_scales.contiguous().",
    ),
    DecodeErrorCase(
        "s-with-padded-states",
        _set("s", lambda t: t.new_zeros(12, 128, 72)[:, :, :64]),
        "decode: each state of s [P*H, V, K] must be dense, with K contiguous or with V contiguous; got shape "
        "(12, 128, 64) with strides (9216, 72, 1). Pass a pool allocated as [P*H, V, K], or pool.transpose(1, 2) of "
        "one allocated as [P*H, K, V].",
    ),
    DecodeErrorCase(
        "s-expanded",
        _set("s", lambda t: t[:1].expand(12, 128, 64)),
        "decode: the rows of s [P*H, V, K] must not overlap: the row stride must be at least V*K = 8192; "
        "got row stride 0. Pass a pool with a state of its own for every row, not an expanded view.",
    ),
    DecodeErrorCase(
        "out-expanded",
        _set("out", lambda t: t[:1].expand(2, 4, 128)),
        "decode: out [B, H, V] must have memory of its own for every element; got shape (2, 4, 128) with strides "
        "(0, 128, 1), which overlap. Pass a tensor that is not an expanded view.",
    ),
    # Memory.
    *(
        DecodeErrorCase(
            f"{first}-overlaps-{second}",
            _share(first, second),
            f"decode: {first} is written and must not overlap {second}; got {first} and {second} sharing memory. "
            f"Pass {first} with memory of its own.",
        )
        for first, second in (
            ("out", "q"),
            ("out", "k"),
            ("out", "v"),
            ("out", "s_offsets"),
            ("out", "decay_scales"),
            ("s", "q"),
            ("s", "k"),
            ("s", "v"),
            ("s", "s_offsets"),
            ("s", "decay_scales"),
        )
    ),
    DecodeErrorCase(
        "out-overlaps-s",
        _share("s", "out"),
        "decode: out is written and must not overlap s; got out and s sharing memory. Pass out with memory of its own.",
    ),
    DecodeErrorCase(
        "out-and-q-interleave",
        _interleave,
        "decode: out is written and must not overlap q; got out and q sharing memory. Pass out with memory of its own.",
    ),
    # Autograd.
    *_each(
        "q k v s decay_scales out",
        lambda name: DecodeErrorCase(
            f"{name}-requires-grad",
            _set(name, lambda t: t.requires_grad_()),
            f"decode: {name} must not require grad: the operator is for inference only; got requires_grad=True while "
            f"grad mode is on. Call under torch.no_grad() or pass {name}.detach().",
        ),
    ),
    # Options.
    DecodeErrorCase(
        "softmax_scale-is-a-tensor",
        _set("softmax_scale", lambda _: torch.tensor(0.5)),
        "decode: softmax_scale must be a real number or None; got a Tensor. "
        "Pass a Python float, for example softmax_scale=0.125.",
    ),
    DecodeErrorCase(
        "softmax_scale-is-beyond-floats",
        _set("softmax_scale", lambda _: 10**400),
        "decode: softmax_scale must fit a float; got 10000000000000000000... Pass a smaller number.",
    ),
    DecodeErrorCase(
        "s-is-sparse",
        _set("s", lambda t: t.to_sparse()),
        "decode: s must be a dense tensor [P*H, V, K]; got layout sparse_coo. Allocate s as a dense tensor; "
        "a copy would lose the update.",
    ),
    DecodeErrorCase(
        "softmax_scale-is-a-bool",
        _set("softmax_scale", lambda _: True),
        "decode: softmax_scale must be a real number or None; got a bool. "
        "Pass a Python float, for example softmax_scale=0.125.",
    ),
    DecodeErrorCase(
        "check_offsets-is-a-number",
        _set("check_offsets", lambda _: 1),
        "decode: check_offsets must be True, False or None; got 1. Leave check_offsets out for the default.",
    ),
)

DECODE_OFFSET_ERROR_CASES: tuple[DecodeErrorCase, ...] = (
    DecodeErrorCase(
        "offset-is-P",
        _set_offsets(0, 3),
        "decode: s_offsets must be negative (padding) or below P = 3; got slot 3 in row 1. "
        "Pass the slot that each row owns.",
    ),
    DecodeErrorCase(
        "offsets-beyond-P",
        _set_offsets(6, 2**31 - 1),
        "decode: s_offsets must be negative (padding) or below P = 3; got slot 6 in row 0 and 1 more, in rows 1. "
        "Pass the slot that each row owns.",
    ),
    DecodeErrorCase(
        "offset-twice",
        _set_offsets(2, 2),
        "decode: s_offsets must name each slot at most once; got slot 2 in rows 0 and 1. "
        "Give every row its own slot; padding rows are negative.",
    ),
)
"""Wrong values of the offsets: always refused on a CPU, on a GPU only with `check_offsets=True`."""
