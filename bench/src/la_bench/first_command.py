"""`la-bench first`: options in, a table out."""

from __future__ import annotations

from argparse import Namespace

import torch

from la_bench.environment import read_environment
from la_bench.errors import UsageError
from la_bench.first_call import first_json_lines, first_table, measure_first, select_modes
from la_bench.first_call_process import SIZE, B, H, P
from la_bench.gpu_timing import require_cuda
from la_bench.option_words import option_words
from la_bench.terminal import filled_table, print_line, progress_bar, show
from la_bench.variants import backend_facts
from la_bench.write_report import check_file, write_file
from la_core import BackendUnavailable, DecodeProblem
from la_core.backends.discover_backends import load_backend
from la_core.spec.decode_problem import compute_capability


def first(options: Namespace) -> int:
    """`la-bench first`."""
    if options.device == "cuda":
        require_cuda()
    device = torch.device("cuda" if options.device != "cpu" and torch.cuda.is_available() else "cpu")
    package = _package(options.backend, device)
    modes = select_modes(options.backend, options.modes)
    words = " ".join(option_words(options, "backend", "modes", "samples", "device"))
    environment = read_environment(device, seed=0, quick=False, options=words)
    if options.out is not None:
        check_file(options.out)
    with progress_bar() as progress:
        task = progress.add_task("first calls", total=1.0)

        def tick(done: float) -> None:
            progress.update(task, completed=done)

        results, stopped = measure_first(options.backend, package, device.type, modes, options.samples, tick)
    show(filled_table(f"first decode call of a process, {environment.machine}", first_table(results)))
    if options.out is not None and results:
        write_file(options.out, first_json_lines(results, backend_facts(options.backend).source_hash, environment))
    limit = options.max_ms
    broken = [result for result in results if result.fault is not None]
    for result in broken:
        print_line(f"ERROR: {options.backend}, {result.mode}: {result.fault}")
    good = [result for result in results if result.fault is None]
    too_slow = [result for result in good if limit is not None and result.beyond.median > limit]
    for result in too_slow:
        print_line(f"OVER THE LIMIT of {limit:g} ms: {result.mode}: {result.beyond.median:.1f} ms beyond a later call")
    if stopped:
        print_line("stopped by Ctrl-C; the table has what was measured before")
        return 130
    return 1 if broken or too_slow else 0


def _package(name: str, device: torch.device) -> str:
    """The package of a backend that makes the call.

    Raises
    ------
    UsageError
        There is no such backend, or it refuses the call.
    """
    try:
        backend = load_backend(name)
    except BackendUnavailable as reason:
        raise UsageError(f"--backend: {reason}") from reason
    arch = compute_capability(device)
    problem = DecodeProblem.contiguous(B=B, P=P, H=H, K=SIZE, V=SIZE, device=device.type, arch=arch)
    refusal = backend.refusal(problem)
    if refusal is not None:
        raise UsageError(f"--backend {name} {refusal}.")
    return type(backend).__module__.partition(".")[0]
