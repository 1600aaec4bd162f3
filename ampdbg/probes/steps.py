"""The ended steps of a loop, read in bulk. A long run keeps only some of its healthy steps."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Container, Iterator, Mapping, Set
from dataclasses import replace

import torch

from ampdbg import quantities
from ampdbg.probes.loss_graph import is_loss_scale
from ampdbg.probes.models import Models
from ampdbg.probes.open_step import OpenStep
from ampdbg.probes.tensors import Scalar, are_on_host, nonfinite_in_model, to_host
from ampdbg.record.log import RunLog
from ampdbg.record.run import LeftOut, Step, TensorCounts

UNREAD_STEPS = 64
"""On a GPU one sync reads this many healthy steps, which are kept as device scalars until then."""

MOST_STEPS = 2_000
"""Drop healthy steps of a longer run: first three of four, later seven of eight, and so on."""

STEPS_AT_ENDS = 200
"""The first and the last steps of a run, this many each, are always kept."""

MOST_INFORMATIVE = 4_000
"""Keep up to this many informative steps, which failed or changed the loss scale. Of more, keep one stretch in two,
later one in four, and so on. So the record stays small even if every step fails."""

STRETCH = 32
"""Keep or drop this many consecutive steps together, so that the effect of a step on the next stays visible."""

MOST_TURNS = 4
"""For up to this many optimizers that take turns, the steps around an informative step are kept."""

FEW_STEPS = 8
REPAIRED = "the script replaced inf or NaN in the gradients of {} of {}, so that no later step shows them"
FLAT = "every gradient of the last {} is zero: the model learns nothing, whatever the loss is"
"""Half precision may have flushed the gradients to zero, or no graph connects the loss to the weights."""

NORM_EVERY = 8
"""After ``STEPS_AT_ENDS`` steps, measure the gradient norm of one healthy step in this many. A norm is a pass over
memory. If a scaler checks the gradients, only the curve on the page needs the norm."""

FIRST_NORMS = 16
"""On a GPU ``NORM_EVERY`` applies after this many steps: a loop with small layers is bound by kernel launches."""

LISTED_STEPS = 50
"""This many unhealthy steps list their groups. Later steps only count them, to keep the record small."""

LISTED_PARAMETERS = 10_000
"""All steps list up to this many parameters, about 2 MB of JSON. The first unhealthy step has no limit."""


class StepLog:
    """The steps of one loop. ``batch`` collects the non-finite leaves of the current step's batches.

    Args:
        model: Its parameters and buffers are checked on unhealthy steps.
        on_step: Called with each Step as it ends.
    """

    def __init__(self, model: torch.nn.Module | Models, on_step: Callable[[Step], None] | None) -> None:
        self.batch: list[TensorCounts] = []
        self._model = model
        self.poisoned: Callable[[], Set[str]] = frozenset
        """Returns the names of the buffers in which the current forward pass has written inf or NaN."""
        self._known_bad: set[str] = set()
        self._listed_steps = self._unlisted_steps = 0
        self._listed_parameters = self._repaired = 0
        self._on_step = on_step
        self._losses: dict[str, Scalar] = {}
        self._unread: list[OpenStep] = []
        self._last_skip = -NORM_EVERY - 1
        self._changing = threading.RLock()
        """Held while the lists change, for loops in several threads; never held while user code runs."""
        self._steps: list[Step] = []
        self._latest: dict[int, Step] = {}
        """The latest step that was read, for each optimizer."""
        self._informative: set[int] = set()
        self._seen_bad: set[tuple[str, str, bool]] = set()
        self._listed: set[int] = set()
        self._room, self._stride, self._stretches = MOST_STEPS, 1, 1
        self.has_own_scale = False
        self._loss_weights = set[float]()
        """True if the loop itself has multiplied a loss by a loss scale."""
        self.left_out = LeftOut()
        """The number of failing steps that were dropped."""
        self.journal: RunLog | None = None
        """Receives every step once it is read, and the kept steps when healthy steps are dropped."""
        self.look_at_model()

    def look_at_model(self) -> None:
        """Record the parameters and buffers that are not finite before the current step, if that was not known."""
        found = nonfinite_in_model(self._model, but=self._known_bad)
        made_so = self.poisoned() if found else ()
        found = tuple(counts for counts in found if counts.name not in made_so)
        self.batch += found
        self._known_bad |= {counts.name for counts in found}

    @property
    def steps(self) -> tuple[Step, ...]:
        """The ended steps, except for dropped steps of a long run. On a GPU this reads what is unread (one sync)."""
        self._read()
        return tuple(self._steps)

    @property
    def is_read(self) -> bool:
        """True if the numbers of every ended step are on the host."""
        return not self._unread

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks on what the steps leave out."""
        every, counted = self._listed_steps + self._unlisted_steps, self.left_out.unhealthy
        known = [step.grad_norm for step in self._steps if step.grad_norm is not None and not step.skipped]
        notes = [REPAIRED.format(f"{self._repaired:,}", quantities.counted(self.closed(), "step"))] * (
            self._repaired > 0
        )
        last = known[-FEW_STEPS:]
        if last and self.closed() >= FEW_STEPS and not any(last):  # fewer if the rest was skipped
            notes.append(FLAT.format(quantities.counted(len(last), "measured step")))
        if self._unlisted_steps:
            notes.append(f"this run lists the groups of {self._listed_steps} of {every:,} non-finite steps")
        if counted:
            notes.append(f"{counted:,} of the failing steps are counted, but not recorded")
        return tuple(notes)

    def wants_norm(self, *, seldom: bool = False) -> bool:
        """True if the gradient norm of the current step is recorded even if the step is healthy. ``seldom`` limits the
        first norms to ``FIRST_NORMS``. After a skipped step the norm shows when gradients are finite again."""
        number = self.closed()
        is_early = number < (FIRST_NORMS if seldom else STEPS_AT_ENDS)
        return is_early or number % NORM_EVERY == 0 or number <= self._last_skip + NORM_EVERY

    def closed(self) -> int:
        """Return how many steps have ended, read or not."""
        with self._changing:
            return (self._steps[-1].step + 1 if self._steps else 0) + len(self._unread)

    def latest(self) -> Step:
        """Return the last ended step. On a GPU this reads what is unread (one sync)."""
        self._read()
        return self._steps[-1]

    @property
    def has_named_losses(self) -> bool:
        """True if the losses of the current step were added by name, so it is a step of all optimizers."""
        return bool(self._losses)

    def add_losses(self, losses: Mapping[str, torch.Tensor], weight: float) -> None:
        """Add unscaled scalar losses to the current step by name, instead of the losses of the backward passes."""
        for name, loss in losses.items():
            part = loss.detach().float() * weight
            self._losses[name] = self._losses[name] + part if name in self._losses else part

    def close(self, step: OpenStep) -> None:
        step.end()
        step.losses, self._losses = self._losses, {}
        step.nonfinite, self.batch = self.batch, []
        self._last_skip = self.closed() if step.skipped else self._last_skip
        with self._changing:
            self._unread.append(step)
        is_known = are_on_host(step.scalars())
        if step.skipped or is_known or self._on_step is not None or len(self._unread) >= UNREAD_STEPS:
            self._read()

    def stop_callbacks(self) -> None:
        """Stop calling ``on_step``, which would raise again in an interrupted run before everything is recorded."""
        self._on_step = None

    def end_without_backward(self, loss: float, *, is_skipped: bool = False) -> None:
        """End a step with this loss and without a backward pass; it gets the loss scale of the last step.
        ``is_skipped`` says that the loop continues."""
        latest = self.steps[-1:]
        scale, scaler, optimizer = (latest[0].scale, latest[0].scaler, latest[0].optimizer) if latest else (1.0, 0, 0)
        self.close(
            OpenStep(backward_losses=[loss], scale=scale, number=scaler, optimizer=optimizer, skipped=is_skipped)
        )

    def finish(self) -> None:
        """Check parameters and buffers once more: a buffer can hold inf or NaN while every loss is finite. Forget
        buffers that were overwritten with finite values since, such as a queue."""
        self._read()
        with self._changing:
            self._steps[-1:] = map(self._with_bad_tensors, self._steps[-1:])
            if any(counts.kind == "buffer" for step in self._steps for counts in step.nonfinite):
                healed = {name for name, _ in self._model.named_buffers()}  # a freed model shows nothing
                healed -= {counts.name for counts in nonfinite_in_model(self._model)}
                self._steps = [_but_for(healed, step) for step in self._steps]

    def _read(self) -> None:
        """Turn the unread steps into Steps, with one transfer for all steps."""
        with self._changing:
            unread, self._unread = self._unread, []
            values = iter(to_host([scalar for step in unread for scalar in step.scalars()]))
            made = [self._taken(step, values) for step in unread]
        if self._on_step is not None:
            for step in made:
                self._on_step(step)

    def is_own_scale(self, factor: float) -> bool:
        """True if the loop's factor on a loss counts as a loss scale: no earlier step shows that it is a weight."""
        return self.has_own_scale or (is_loss_scale(factor) and factor not in self._loss_weights)

    def _iteration(self, optimizer: int) -> int:
        """Return how many steps of an optimizer have been read."""
        latest = self._latest.get(optimizer)
        return 0 if latest is None else latest.iteration + 1

    def _taken(self, ended: OpenStep, values: Iterator[float]) -> Step:
        """Complete a step from its numbers, log it to the journal, and keep it."""
        step = ended.to_step(self.closed(), self._iteration, values, has_own_scale=self.is_own_scale(ended.factor))
        self.has_own_scale |= step.scale != 1.0 and not step.scaler
        if step.scale == 1.0:
            self._loss_weights.add(ended.factor)
        self._repaired += step.repaired
        if step.skipped or not math.isfinite(step.loss):
            step = self._with_bad_tensors(step)
        step = self._with_few_groups(step)
        if self.journal is not None:
            self.journal.step(step)
        self._keep(step)
        return step

    def _keep(self, step: Step) -> None:
        """Add a step; drop some steps if there are too many."""
        bad = {(counts.kind, counts.name, counts.nan > 0) for counts in step.nonfinite} - self._seen_bad
        self._seen_bad |= bad
        has_new_scale = step.scale != self._latest.get(step.optimizer, step).scale
        self._latest[step.optimizer] = step
        if bad or has_new_scale or not step.is_healthy:
            self._informative.add(step.step)
        if bad or step.groups:
            self._listed.add(step.step)
        self._steps.append(step)
        if len(self._steps) >= self._room:
            self._thin(step.step)

    def _thin(self, last: int) -> None:
        """Drop healthy steps far from informative steps; drop stretches if there are too many informative steps."""
        while (last + 1) // self._stride > MOST_STEPS // 4:
            self._stride *= 2
        while len(self._informative - self._listed) > MOST_INFORMATIVE:
            self._stretches *= 2
            self._informative = {
                number
                for number in self._informative
                if _is_at_end(number, last) or number in self._listed or number // STRETCH % self._stretches == 0
            }
        every, self._steps = self._steps, [kept for kept in self._steps if self._stays(kept.step, last)]
        self._room = max(MOST_STEPS, 2 * len(self._steps))
        stay = {step.step for step in self._steps}
        self.left_out = self.left_out.and_these([step for step in every if step.step not in stay])
        if self.journal is not None:
            self.journal.thinned(self._steps)

    def _stays(self, number: int, last: int) -> bool:
        beside = min(len(self._latest), MOST_TURNS)  # covers the previous and next step of the same optimizer
        is_beside_one_that_tells = not self._informative.isdisjoint(range(number - beside, number + beside + 1))
        return _is_at_end(number, last) or number % self._stride == 0 or is_beside_one_that_tells

    def _with_few_groups(self, step: Step) -> Step:
        """Return the step with its groups, or only their number if the record already lists enough groups."""
        if not step.groups:
            return step
        size = self._listed_parameters + sum(len(group.parameters) for group in step.groups)
        is_full = self._listed_steps >= LISTED_STEPS or size > LISTED_PARAMETERS
        if self._listed_steps and is_full:
            self._unlisted_steps += 1
            return replace(step, groups=(), groups_hit=len(step.groups))
        self._listed_steps, self._listed_parameters = self._listed_steps + 1, size
        return step

    def _with_bad_tensors(self, step: Step) -> Step:
        """Add each parameter and buffer that is not finite to the first step that shows it."""
        found = nonfinite_in_model(self._model, "after", but=self._known_bad)
        self._known_bad |= {counts.name for counts in found}
        return replace(step, nonfinite=(*step.nonfinite, *found))


def _but_for(healed: Container[str], step: Step) -> Step:
    """Return the step without the buffers that held inf or NaN only for a while."""
    kept = tuple(one for one in step.nonfinite if one.kind != "buffer" or one.when != "after" or one.name not in healed)
    return step if kept == step.nonfinite else replace(step, nonfinite=kept)


def _is_at_end(number: int, last: int) -> bool:
    """True if a step is among the first steps, or the last steps so far."""
    return number < STEPS_AT_ENDS or last - number < STEPS_AT_ENDS
