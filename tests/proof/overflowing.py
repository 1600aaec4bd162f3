"""A folder with a small model that overflows in FP16, its failing step, and hand-written patches for it."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

from ampdbg.config.file import load_config
from ampdbg.config.schema import Config
from ampdbg.observer import UNOBSERVED, Observer
from ampdbg.patch.file_edits import Patched
from ampdbg.proof.jobs import FreshProcesses, Job, JobResult, Pending
from ampdbg.proof.processes import Task
from ampdbg.proof.proof import prove
from ampdbg.record.pins import Proof, ProofStep
from ampdbg.record.run import Investigation
from ampdbg.replay.pinned_replays import ScaleRange
from ampdbg.replay.run import Run, prepared
from ampdbg.replay.snapshot import FailingStep, Snapshot, failing_step
from ampdbg.training.loop import train_prepared
from ampdbg.workload.targets import imports_apart

NET = """\
import torch
import torch.nn.functional as F
from torch import nn

GAIN = 300.0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.before(x)
        large = (GAIN * x) @ (GAIN * torch.eye(8, device=x.device))
        x = F.layer_norm(large / GAIN**2, (8,))
        return self.after(x)


def batches():
    generator = torch.Generator().manual_seed(1)
    pairs = [torch.randn(2, 16, 8, generator=generator) for _ in range(4)]
    return [(x, y) for x, y in pairs]


def loss(output, target):
    return F.mse_loss(output.float(), target)
"""

OVERFLOWS = "        large = (GAIN * x) @ (GAIN * torch.eye(8, device=x.device))\n"

IN_FP32 = """\
        with torch.autocast(x.device.type, enabled=False):
            large = (GAIN * x.float()) @ (GAIN * torch.eye(8, device=x.device))
"""

GOOD = NET.replace(OVERFLOWS, IN_FP32)

CONFIG = """\
model: {target: net.py:Net}
data: {target: net.py:batches}
loss: {target: net.py:loss}
optimizer: {args: {lr: 1.0e-3}}
precision: {loss_scale: {init: 1024.0}}
train: {steps: 3}
"""


def written(folder: Path, files: Mapping[str, str] | None = None, config: str = CONFIG) -> Config:
    """Writes ``net.py``, the other files and the config, and reads the config."""
    for name, text in {"net.py": NET, **(files or {}), "config.yaml": config}.items():
        (folder / name).write_bytes(text.encode())
    return load_config(folder / "config.yaml")


def failing_steps(config: Config) -> list[FailingStep]:
    """The first step that the run investigates."""
    kept: list[FailingStep] = []
    with prepared(config) as run:

        def keep(snapshot: Snapshot, scale: float, made: Investigation) -> None:
            kept.append(failing_step(run.workload.model, snapshot, scale, made))

        train_prepared(run, observer=UNOBSERVED, command="bisect", replays=1, on_investigated=keep)
    return kept[:1]


def proven(
    config: Config,
    patch: Mapping[Path, bytes] | Patched,
    without: Mapping[str, Mapping[Path, bytes] | Patched] | None = None,
    *,
    failing: Sequence[FailingStep] | None = None,
    train_steps: int = 8,
    observer: Observer = UNOBSERVED,
    run: Run | None = None,
) -> Proof:
    """The proof of a patch for the failing step in a prepared run, with the defaults of these tests."""
    steps = failing_steps(config) if failing is None else failing
    longer = config.model_copy(update={"train": config.train.model_copy(update={"steps": train_steps})})
    job = Job("patched", longer, _patched(patch), (ScaleRange(),) * len(steps), is_silent=False)
    rests = {title: _patched(rest) for title, rest in (without or {}).items()}
    with FreshProcesses(config.start) as start, prepared(config) if run is None else nullcontext(run) as standing:
        return prove(job, standing, steps, rests, observer, start)


def _patched(given: Mapping[Path, bytes] | Patched) -> Patched:
    return given if isinstance(given, Patched) else Patched(given)


def step_of(proof: Proof, name: str) -> ProofStep:
    """The step with this name."""
    return next(step for step in proof.steps if step.name == name)


def run_in_this_process(self: FreshProcesses, task: Task, job: Job) -> Pending:
    """Runs a task in this process, instead of starting another one, which takes seconds."""

    def pending(observer: Observer) -> JobResult:
        seen: list[JobResult] = []
        with imports_apart():
            task(job, observer, seen.append, job.config.folder)
        return seen[0]

    return pending
