"""What a range profile and an op trace cost: time against the same step without them, memory, size of the record.

Steps are timed in turn as in benchmarks/steps.py, without the optimizer's part, which would flatter the
ratio. Memory is the peak of a process of its own that makes one kind of step only (Linux and macOS).
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from ampdbg.precision.emulation import cuda_on_cpu
from ampdbg.probes.op_trace import OpTrace, placed
from ampdbg.probes.shadow_trace import ShadowTrace, bfloat16_for_float16, sites_of
from ampdbg.record.file import to_json
from ampdbg.record.run import Environment, Record
from benchmarks.steps import Gpt, Task, gpt, loss_of_tokens, machine, threads

Watching = Callable[[torch.nn.Module], AbstractContextManager[Any]]


def deep(tiny: bool) -> Task:
    """A GPT so deep that one step of it is more than 10,000 ops."""
    vocabulary, length, width, depth, heads, batch = (50, 8, 16, 2, 2, 2) if tiny else (512, 128, 128, 200, 4, 4)
    ids = torch.randint(vocabulary, (batch, length))
    model = Gpt(vocabulary, length, width, depth, heads)
    return Task("deep gpt", model, ids, loss_of_tokens, ids)


@contextmanager
def shadow(model: torch.nn.Module) -> Iterator[None]:
    """What ``ampdbg ranges`` does around its step, the making of the sites included."""
    with bfloat16_for_float16(), placed(model, ShadowTrace) as trace:
        yield
    sites_of(trace.ranges)


def step(task: Task, dtype: torch.dtype, watching: Watching) -> float:
    """The seconds of one forward and backward pass."""
    task.model.zero_grad()
    start = time.perf_counter()
    with watching(task.model):
        with torch.autocast("cpu", dtype):
            loss = task.forward()
        loss.backward()
    return time.perf_counter() - start


KINDS: dict[str, tuple[torch.dtype, Watching]] = {
    "shadow": (torch.bfloat16, shadow),
    "op trace": (torch.float16, lambda model: placed(model, OpTrace)),
}


def ratio(task: Task, kind: str, rounds: int) -> str:
    """Times pairs of steps, with and without, the one or the other first in turn."""
    dtype, watching = KINDS[kind]
    ways: list[Watching] = [watching, lambda model: nullcontext()]
    times: list[tuple[float, float]] = []
    for turn in range(-1, rounds):
        seconds = {way: step(task, dtype, ways[way]) for way in ((0, 1), (1, 0))[turn % 2]}
        times.append((seconds[0], seconds[1]))
    ratios = [with_ / without for with_, without in times[1:]]
    with_, without = (statistics.median(column) for column in zip(*times[1:], strict=True))
    return (
        f"{task.name:<9} {kind:<9} {1e3 * with_:8.1f} ms, plain {1e3 * without:8.1f} ms   "
        f"ratio {statistics.median(ratios):.2f}, target <= 3, {rounds} rounds"
    )


def sizes(task: Task) -> str:
    """How many ops a step is, and how large its record."""
    with placed(task.model, OpTrace) as trace:
        step(task, torch.float16, lambda model: nullcontext())
    with bfloat16_for_float16(), placed(task.model, ShadowTrace) as ranges:
        step(task, torch.bfloat16, lambda model: nullcontext())
    environment = Environment("", "", "", "", "cpu", "", "cuda", emulated=True)
    record = Record("ranges", "", environment, {}, "healthy", sites=sites_of(ranges.ranges))
    megabytes = len(to_json(record).encode()) / 1e6
    return f"{task.name:<9} {len(trace.ops)} ops, {len(record.sites)} sites, record {megabytes:.2f} MB, target < 5 MB"


def peak(kind: str) -> int:
    """The peak memory of this process after a few steps of one kind, in the system's unit."""
    dtype, watching = KINDS[kind] if kind in KINDS else (torch.bfloat16, lambda model: nullcontext())
    with cuda_on_cpu():
        task = gpt(tiny=False)
        for _ in range(3):
            step(task, dtype, watching)
    import resource  # Windows has none

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def memory(kind: str) -> str:
    """The peak of a process with ``kind`` against one without."""
    one, other = (
        int(subprocess.check_output([sys.executable, "-m", "benchmarks.ranges", "--peak", name], cwd=ROOT))
        for name in (kind, "plain")
    )
    return f"gpt       {kind:<9} peak memory {one / other:.2f} of a plain process's, target <= 1.2"


ROOT = Path(__file__).parent.parent


def main(arguments: list[str] | None = None) -> None:
    """Prints a line for each measurement."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=21, help="pairs of steps")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--tiny", action="store_true", help="models of a few hundred parameters, and no memory")
    parser.add_argument("--peak", metavar="KIND", help="only print this process's peak memory with one kind of step")
    options = parser.parse_args(arguments)
    with threads(options.threads):
        if options.peak:
            print(peak(options.peak))
            return
        print(machine())
        with cuda_on_cpu():
            torch.manual_seed(0)
            for task in (gpt(options.tiny), deep(options.tiny)):
                print(sizes(task), flush=True)
                for kind in KINDS:
                    print(ratio(task, kind, options.rounds), flush=True)
    if not options.tiny:
        print(memory("shadow"))


if __name__ == "__main__":
    main()
