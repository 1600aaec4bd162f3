"""What a training step costs: emulated FP16 against FP32 and against the CPU's own FP16, watched against bare; with
``--device cuda`` watched against bare on a GPU.

Each comparison times a few steps in a row of two kinds in turn, A B B A, in one process, so that a slow moment of the
machine hits both; what counts is the median of the ratios A/B of neighbours. A row is as long as what a watcher does
only now and then takes to come round. Nothing is asserted: the targets are printed beside the ratios, and where the
median would lie with 95 % if the pairs were made again.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ampdbg.precision.emulation import cuda_on_cpu
from ampdbg.probes.steps import NORM_EVERY
from ampdbg.probes.watch import Watch, watch
from ampdbg.record.log import RunLog
from ampdbg.script.capture import Captures
from ampdbg.script.launch import Start
from ampdbg.script.session import Session


class Block(nn.Module):
    """A block of a GPT: causal attention and a feed-forward part, each behind its norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    """A GPT with a head of its own; ``forward`` takes token ids (batch, length) and gives logits."""

    def __init__(self, vocabulary: int, length: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


class Scales(nn.Module):
    """Many small parameters, as in a model of a thousand adapters: vectors that scale, one after another."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(width)) for _ in range(count)])

    def forward(self, x: Tensor) -> Tensor:
        for scale in self.scales:
            x = x * scale
        return x


@dataclass(frozen=True)
class Task:
    """A model, its batch and its loss."""

    name: str
    model: nn.Module
    inputs: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]
    targets: Tensor

    def on(self, device: str) -> Task:
        """The same with the model and all data on a device; the model itself moves."""
        return replace(
            self, model=self.model.to(device), inputs=self.inputs.to(device), targets=self.targets.to(device)
        )

    def forward(self) -> Tensor:
        """The loss of a step."""
        return self.loss(self.model(self.inputs), self.targets)

    @property
    def device(self) -> str:
        """``cpu`` or ``cuda``."""
        return self.inputs.device.type

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())


def loss_of_tokens(logits: Tensor, ids: Tensor) -> Tensor:
    """Cross entropy of logits (batch, length, vocabulary) against the ids (batch, length) that were to come."""
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def gpt(tiny: bool) -> Task:
    """Six layers and 5.8 M parameters, on 8 sequences of 128 random tokens."""
    vocabulary, length, width, depth, heads, batch = (50, 8, 16, 1, 2, 2) if tiny else (2048, 128, 256, 6, 8, 8)
    ids = torch.randint(vocabulary, (batch, length))
    return Task("gpt", Gpt(vocabulary, length, width, depth, heads), ids, loss_of_tokens, ids.roll(-1, 1))


def gpt2(tiny: bool) -> Task:
    """The size of GPT-2: twelve layers and 163 M parameters, on 8 sequences of 1,024 random tokens."""
    vocabulary, length, width, depth, heads, batch = (50, 8, 16, 1, 2, 2) if tiny else (50304, 1024, 768, 12, 12, 8)
    ids = torch.randint(vocabulary, (batch, length))
    return Task("gpt2", Gpt(vocabulary, length, width, depth, heads), ids, loss_of_tokens, ids.roll(-1, 1))


def convnet(tiny: bool) -> Task:
    """Four convolutions of 32 to 256 channels with batch norm, on 16 random images of 32 by 32."""
    side, batch, widths = (8, 2, (4, 8)) if tiny else (32, 16, (32, 64, 128, 256))
    layers: list[nn.Module] = []
    for before, after in zip((3, *widths), widths, strict=False):
        layers += [
            nn.Conv2d(before, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))
    targets = torch.randint(10, (batch,))
    images = torch.randn(batch, 3, side, side)
    return Task("convnet", model, images, F.cross_entropy, targets)


def small_parameters(tiny: bool) -> Task:
    """2,000 parameters of 64 elements each."""
    count = 20 if tiny else 2000
    return Task("small parameters", Scales(count, 64), torch.randn(32, 64), F.mse_loss, torch.zeros(32, 64))


Watching = Callable[[Task, torch.optim.Optimizer], tuple[AbstractContextManager[object], Watch | None]]
"""What watches the steps of an optimizer that trains the model of a task while it is entered, and the watcher in it."""


def by_nobody(task: Task, optimizer: torch.optim.Optimizer) -> tuple[AbstractContextManager[object], None]:
    """Nothing watches."""
    return nullcontext(), None


def by_name(task: Task, optimizer: torch.optim.Optimizer) -> tuple[AbstractContextManager[object], Watch]:
    """As ``ampdbg.watch``, which is given the model and the optimizer."""
    watcher = watch(task.model, optimizer)
    return watcher, watcher


LOGS = TemporaryDirectory(prefix="ampdbg-benchmark-")
"""Goes with the process."""


def as_run_does(task: Task, optimizer: torch.optim.Optimizer) -> tuple[AbstractContextManager[object], Watch]:
    """As ``ampdbg run``, which finds them while they train: all that it puts around a script, and its log."""
    captures = Captures(Path(LOGS.name), Start("train.py"), most=0, largest=0)
    session = Session(captures, RunLog(Path(LOGS.name, f"{task.name}.jsonl"), "run", print))
    session.watcher.optimizers.made(optimizer)  # a script makes it while it is watched
    return session, session.watcher


WARM_UP = 20
"""The first step allocates the optimizer's state, and a watcher looks closer at the first calls than at later ones."""

ROW = NORM_EVERY
"""So many steps are timed in a row."""

SETTLES = 2
"""So many steps are made before them: in a run the contexts are entered once, and the watcher starts once. Neither is
part of a step, nor are the processor's caches as they leave them, nor Python's, which forgets what it has learnt of a
class whose method is replaced."""


class Trainer:
    """One way to train a task: ``timed_steps`` makes steps inside its contexts and gives the seconds of one."""

    def __init__(
        self,
        task: Task,
        policy: Callable[[], AbstractContextManager[None]],
        half: bool,
        watching: Watching = by_nobody,
    ) -> None:
        self.task, self.policy, self.half = task, policy, half
        self.optimizer = torch.optim.AdamW(task.model.parameters(), lr=1e-4)
        self.scaler = torch.amp.GradScaler(task.device, init_scale=1024.0, enabled=half)
        self.watching, self.watcher = watching(task, self.optimizer)

    def timed_steps(self, count: int) -> float:
        with self.policy(), self.watching:
            for _ in range(min(SETTLES, count)):
                self.step()
            self.finish()
            start = time.perf_counter()
            for _ in range(count):
                self.step()
            self.finish()
            return (time.perf_counter() - start) / count

    def finish(self) -> None:
        """Waits until a GPU has done what it was given."""
        if self.task.device == "cuda":
            torch.cuda.synchronize()

    def step(self) -> None:
        self.optimizer.zero_grad()
        with torch.autocast(self.task.device, torch.float16, enabled=self.half):
            loss = self.task.forward()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def unwatched(self) -> Trainer:
        """The same trainer with nobody watching: the same weights and state at the same place in memory."""
        other = copy.copy(self)
        other.watching, other.watcher = nullcontext(), None
        return other

    def check(self) -> None:
        """Raises RuntimeError where the watcher has seen fewer steps than the warm-up has made."""
        if self.watcher is not None and len(self.watcher.steps) < WARM_UP:
            raise RuntimeError(f"the watcher has seen {len(self.watcher.steps)} of at least {WARM_UP} steps")


def bfloat16_weights(task: Task, watching: Watching = by_nobody) -> Trainer:
    """Trains weights that are stored in bfloat16; a watcher holds samples of their updates against float32 masters."""
    return Trainer(replace(task, model=task.model.to(torch.bfloat16)), nullcontext, half=False, watching=watching)


WAYS: dict[str, Callable[[Task], Trainer]] = {
    "bfloat16": bfloat16_weights,
    "watched bfloat16": lambda task: bfloat16_weights(task, by_name),
    "FP32": lambda task: Trainer(task, nullcontext, half=False),
    "emulated FP16": lambda task: Trainer(task, cuda_on_cpu, half=True),
    "native FP16": lambda task: Trainer(task, nullcontext, half=True),
    "watched FP16": lambda task: Trainer(task, cuda_on_cpu, half=True, watching=by_name),
    "ampdbg run": lambda task: Trainer(task, cuda_on_cpu, half=True, watching=as_run_does),
}
"""The ways on a CPU."""

WAYS_ON_GPU: dict[str, Callable[[Task], Trainer]] = {
    "bfloat16": bfloat16_weights,
    "watched bfloat16": lambda task: bfloat16_weights(task, by_name),
    "FP16": lambda task: Trainer(task, nullcontext, half=True),
    "watched FP16": lambda task: Trainer(task, nullcontext, half=True, watching=by_name),
    "ampdbg run": lambda task: Trainer(task, nullcontext, half=True, watching=as_run_does),
}
"""The ways on a GPU, which computes FP16 itself."""


@dataclass(frozen=True)
class Comparison:
    """Two ways to train the same task; ``target`` bounds the ratio of their steps as the project promises it."""

    task: Callable[[bool], Task]
    first: str
    second: str
    target: str
    slow: bool = False


COMPARISONS = (
    Comparison(gpt, "emulated FP16", "FP32", "<= 1.5"),
    Comparison(gpt, "watched FP16", "emulated FP16", "<= 1.03"),
    Comparison(gpt, "ampdbg run", "emulated FP16", "<= 1.01"),
    Comparison(gpt, "native FP16", "emulated FP16", ">= 8", slow=True),
    Comparison(gpt, "watched bfloat16", "bfloat16", "<= 1.05"),
    Comparison(convnet, "emulated FP16", "FP32", "<= 1.5"),
    Comparison(convnet, "watched FP16", "emulated FP16", "<= 1.03"),
    Comparison(convnet, "ampdbg run", "emulated FP16", "<= 1.03"),
    Comparison(convnet, "native FP16", "emulated FP16", ">= 8", slow=True),
    Comparison(small_parameters, "watched FP16", "emulated FP16", "<= 1.03"),
)

COMPARISONS_ON_GPU = (
    Comparison(gpt2, "watched FP16", "FP16", "<= 1.01"),
    Comparison(gpt2, "ampdbg run", "FP16", "<= 1.01"),
    Comparison(gpt2, "watched bfloat16", "bfloat16", "<= 1.05"),
    Comparison(gpt, "watched FP16", "FP16", "<= 1.03"),
    Comparison(gpt, "ampdbg run", "FP16", "<= 1.03"),
    Comparison(convnet, "watched FP16", "FP16", "<= 1.03"),
    Comparison(convnet, "ampdbg run", "FP16", "<= 1.03"),
    Comparison(small_parameters, "watched FP16", "FP16", "<= 1.03"),
)


@dataclass(frozen=True)
class Result:
    """One comparison, measured: times are of one step, medians in seconds, ratios those of neighbouring rows.

    ``interval`` holds the true median of the ratios with 95 %; half of all ratios lie between the ``quartiles``.
    """

    task: str
    parameters: int
    first: str
    second: str
    first_seconds: float
    second_seconds: float
    ratio: float
    interval: tuple[float, float]
    quartiles: tuple[float, float]
    target: str
    rounds: int

    def line(self) -> str:
        low, high = self.interval
        return (
            f"{self.task:<17} {self.first:>13} {1e3 * self.first_seconds:8.1f} ms {self.second:>14} "
            f"{1e3 * self.second_seconds:8.1f} ms   ratio {self.ratio:6.3f} ({low:.3f} to {high:.3f}), "
            f"target {self.target}, {self.rounds} rounds"
        )


def compare(comparison: Comparison, rounds: int, tiny: bool, device: str = "cpu") -> Result:
    """Times ``rounds`` pairs of rows, both trainers working on one model; a slow one makes one step a row."""
    torch.manual_seed(0)
    task = comparison.task(tiny).on(device)
    ways = WAYS_ON_GPU if device == "cuda" else WAYS
    first = ways[comparison.first](task)
    second = first.unwatched() if first.watcher is not None else ways[comparison.second](task)
    count = 1 if comparison.slow else ROW
    for trainer in (first, second):
        trainer.timed_steps(2 if comparison.slow else WARM_UP)
        trainer.check()
    times = [pair(first, second, count, first_leads=i % 2 == 0) for i in range(rounds)]
    ratios = sorted(one / other for one, other in times)
    return Result(
        task.name,
        task.parameters,
        comparison.first,
        comparison.second,
        statistics.median(one for one, _ in times),
        statistics.median(other for _, other in times),
        statistics.median(ratios),
        interval_of_median(ratios),
        (ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]),
        comparison.target,
        rounds,
    )


def interval_of_median(ordered: Sequence[float]) -> tuple[float, float]:
    """The order statistics that enclose the median of what the values were drawn from with 95 %, or nearly: how many
    values lie below it is binomial, here taken as normal."""
    below = max(0, math.floor(len(ordered) / 2 - 1.96 * math.sqrt(len(ordered)) / 2))
    return ordered[below], ordered[-1 - below]


def pair(first: Trainer, second: Trainer, count: int, first_leads: bool) -> tuple[float, float]:
    """The seconds of a step of each, one row right after the other, in turn the one or the other ahead."""
    if first_leads:
        return first.timed_steps(count), second.timed_steps(count)
    later = second.timed_steps(count)
    return first.timed_steps(count), later


def machine(device: str = "cpu") -> str:
    """What the figures were taken on, in words that fit any machine of the kind."""
    gpu = f"{torch.cuda.get_device_name()}, " if device == "cuda" else ""
    return f"{gpu}{torch.get_num_threads()} threads on {os.cpu_count()} vCPU {processor()}, torch {torch.__version__}"


def processor() -> str:
    """The processor's name as the system gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Sets the number of CPU threads for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=41, help="pairs of rows of steps in each comparison")
    parser.add_argument(
        "--slow-rounds", type=int, default=3, help="the same where the CPU's own FP16 takes part; 0: none"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the steps are made")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--only", default="", help="what to measure: gpt, or 'gpt ampdbg run'")
    parser.add_argument("--tiny", action="store_true", help="models of a few hundred parameters: a trial of the script")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Runs the comparisons, prints a line for each and writes the figures."""
    options = parse(arguments)
    results: list[Result] = []
    with threads(options.threads):
        print(machine(options.device))
        for comparison in COMPARISONS_ON_GPU if options.device == "cuda" else COMPARISONS:
            rounds = options.slow_rounds if comparison.slow else options.rounds
            if options.only in f"{comparison.task.__name__} {comparison.first}" and rounds:
                results.append(compare(comparison, rounds, options.tiny, options.device))
                print(results[-1].line(), flush=True)
        if options.json:
            figures = {"machine": machine(options.device), "results": [asdict(result) for result in results]}
            options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
