"""Public kernels of others, called for comparison when they are at hand. None is a dependency, none is copied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from la_bench.errors import UsageError
from la_bench.peers.cula import CulaPeer
from la_bench.peers.fla import FlaPeer
from la_bench.peers.peer import Peer, PeerUnavailable
from la_bench.peers.sglang import SglangPeer
from la_bench.peers.torch_naive import TorchNaivePeer
from la_bench.peers.vllm import VllmPeer

PEERS: dict[str, type[Peer]] = {peer.name: peer for peer in (CulaPeer, SglangPeer, VllmPeer, FlaPeer, TorchNaivePeer)}
"""By name, in the order of a report."""


def select_peers(wanted: Sequence[str], paths: Mapping[str, Path], *, by_default: bool) -> tuple[str, ...]:
    """Names of the peers to run: those named or given a path; without any, all or none.

    Raises
    ------
    UsageError
        A name is unknown, or a path does not exist.
    """
    for name in (*(n for n in wanted if n != "none"), *paths):
        if name not in PEERS:
            raise UsageError(f"no peer is called {name!r}. Known: {', '.join(PEERS)}.")
    for name, path in paths.items():
        if not path.exists():
            raise UsageError(f"--peer {name}={path}: there is no such file or folder.")
    if wanted:
        return tuple(name for name in PEERS if name in wanted or name in paths)
    return tuple(name for name in PEERS if by_default or name in paths)


def load_peer(name: str, path: Path | None) -> Peer | PeerUnavailable:
    """The peer from `path` or from where it is installed, or why there is none."""
    try:
        return PEERS[name](path)
    except PeerUnavailable as reason:
        return reason
    except ImportError as reason:
        return PeerUnavailable(f"{name} needs what is not installed: {reason}")
