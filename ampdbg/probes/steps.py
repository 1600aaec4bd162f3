"""The steps of a loop that have ended, read in bulk; of a long run's healthy ones only some are kept."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Container, Iterator, Mapping, Set
from dataclasses import replace

import torch

from ampdbg import quantities
from ampdbg.probes.models import Models
from ampdbg.probes.open_step import OpenStep
from ampdbg.probes.tensors import Scalar, are_on_host, nonfinite_in_model, to_host
from ampdbg.record.log import RunLog
from ampdbg.record.run import LeftOut, Step, TensorCounts

UNREAD_STEPS = 64
"""On a GPU so many healthy steps are kept as device scalars before one sync reads them all."""

MOST_STEPS = 2_000
"""Of a run with more steps, healthy ones are left out: three of four, later seven of eight, and so on."""

STEPS_AT_ENDS = 200
"""So many of the first and of the last steps are kept in any case."""

MOST_TELLING = 4_000
"""Of more steps that went wrong, or changed the loss scale, those of one stretch in two are kept, later of one in
four, and so on: a run whose every step fails ends as small as a healthy one."""

STRETCH = 32
"""So many steps in a row are kept or left out together: what one does to the next can still be seen."""

MOST_TURNS = 4
"""Of so many optimizers that take turns the steps right before and behind one that tells are kept of each."""

FEW_STEPS = 8
FLAT = "every gradient of the last {} is zero: the model learns nothing, whatever the loss is"
"""Half precision may have flushed them to zero, or nothing leads from the loss to the weights."""

NORM_EVERY = 8
"""Behind the first ``STEPS_AT_ENDS`` the norm of one healthy step in so many is taken: it is a pass over memory, and
nothing but the page's curve is drawn from it where a scaler tells whether the gradients are finite."""

FIRST_NORMS = 16
"""On a GPU, which a loop with small layers keeps waiting for its next kernel, that begins behind so many steps."""

LISTED_STEPS = 50
"""So many unhealthy steps list their groups; later ones only count them, so that the record stays small."""

LISTED_PARAMETERS = 10_000
"""So many parameters are listed over all steps, about 2 MB of JSON; the first unhealthy step lists all of its own."""


class StepLog:
    """The steps of one loop. ``batch`` collects the non-finite leaves of the batches of the step under way.

    Args:
        model: its parameters and buffers are checked on unhealthy steps.
        on_step: called with each Step as it ends.
    """

    def __init__(self, model: torch.nn.Module | Models, on_step: Callable[[Step], None] | None) -> None:
        self.batch: list[TensorCounts] = []
        self._model = model
        self.poisoned: Callable[[], Set[str]] = frozenset
        """The buffers that the forward pass under way has made inf or NaN, by name."""
        self._known_bad: set[str] = set()
        self._listed_steps = self._unlisted_steps = 0
        self._listed_parameters = 0
        self._on_step = on_step
        self._losses: dict[str, Scalar] = {}
        self._unread: list[OpenStep] = []
        self._last_skip = -NORM_EVERY - 1
        self._changing = threading.RLock()
        """Held where the lists change, for the loops of other threads; never while something of the user's runs."""
        self._steps: list[Step] = []
        self._latest: dict[int, Step] = {}
        """The last step that was read of each optimizer."""
        self._telling: set[int] = set()
        self._seen_bad: set[tuple[str, str, bool]] = set()
        self._listed: set[int] = set()
        self._room, self._stride, self._stretches = MOST_STEPS, 1, 1
        self.has_own_scale = False
        """The loop has multiplied a loss by a loss scale of its own."""
        self.left_out = LeftOut()
        """How many steps that went wrong are no longer among the others."""
        self.journal: RunLog | None = None
        """Told of every step once it is read, and of what is kept when healthy ones are left out."""
        self.look_at_model()

    def look_at_model(self) -> None:
        """Notes what of the model is not finite before the step under way, where that was not known."""
        found = nonfinite_in_model(self._model, but=self._known_bad)
        made_so = self.poisoned() if found else ()
        found = tuple(counts for counts in found if counts.name not in made_so)
        self.batch += found
        self._known_bad |= {counts.name for counts in found}

    @property
    def steps(self) -> tuple[Step, ...]:
        """Those that have ended, but for healthy ones of a long run; on a GPU this reads what is unread (one sync)."""
        self._read()
        return tuple(self._steps)

    @property
    def is_read(self) -> bool:
        """The numbers of every step that has ended are on the host."""
        return not self._unread

    @property
    def notes(self) -> tuple[str, ...]:
        """What the steps leave out."""
        every, counted = self._listed_steps + self._unlisted_steps, self.left_out.unhealthy
        known = [step.grad_norm for step in self._steps if step.grad_norm is not None and not step.skipped]
        notes = []
        last = known[-FEW_STEPS:]
        if last and self.closed() >= FEW_STEPS and not any(last):  # fewer, where all others were skipped
            notes.append(FLAT.format(quantities.counted(len(last), "measured step")))
        if self._unlisted_steps:
            notes.append(f"this run lists the groups of {self._listed_steps} of {every:,} non-finite steps")
        if counted:
            notes.append(f"{counted:,} of the failing steps are counted, but not recorded")
        return tuple(notes)

    def wants_norm(self, *, seldom: bool = False) -> bool:
        """The step under way is one of those whose gradient norm is to be recorded though it is healthy;
        ``seldom``, of few at the beginning. Behind a skip it tells whether gradients come through again."""
        number = self.closed()
        is_early = number < (FIRST_NORMS if seldom else STEPS_AT_ENDS)
        return is_early or number % NORM_EVERY == 0 or number <= self._last_skip + NORM_EVERY

    def closed(self) -> int:
        """How many steps have ended, read or not."""
        with self._changing:
            return (self._steps[-1].step + 1 if self._steps else 0) + len(self._unread)

    def latest(self) -> Step:
        """The last step that has ended; on a GPU this reads what is still unread (one sync)."""
        self._read()
        return self._steps[-1]

    @property
    def has_named_losses(self) -> bool:
        """Whether the losses of the step under way were added by name: then it is that of all optimizers."""
        return bool(self._losses)

    def add_losses(self, losses: Mapping[str, torch.Tensor], weight: float) -> None:
        """Adds unscaled losses, scalar tensors by name, to the step under way; else those that go backward count."""
        for name, loss in losses.items():
            part = loss.detach().float() * weight
            self._losses[name] = self._losses[name] + part if name in self._losses else part

    def close(self, step: OpenStep) -> None:
        """Ends a step."""
        step.end()
        step.losses, self._losses = self._losses, {}
        step.nonfinite, self.batch = self.batch, []
        self._last_skip = self.closed() if step.skipped else self._last_skip
        with self._changing:
            self._unread.append(step)
        is_known = are_on_host(step.scalars())
        if step.skipped or is_known or self._on_step is not None or len(self._unread) >= UNREAD_STEPS:
            self._read()

    def tell_no_more(self) -> None:
        """Calls ``on_step`` no more: in an interrupted run it would raise again, and cut off what is to be noted."""
        self._on_step = None

    def break_off(self, loss: float, *, is_skipped: bool = False) -> None:
        """Ends a step of this loss from which nothing has gone backward; its loss scale is that of the last one.

        ``is_skipped`` says that the loop goes on behind it.
        """
        latest = self.steps[-1:]
        scale, scaler, optimizer = (latest[0].scale, latest[0].scaler, latest[0].optimizer) if latest else (1.0, 0, 0)
        self.close(OpenStep(scaled=[loss], scale=scale, number=scaler, optimizer=optimizer, skipped=is_skipped))

    def finish(self) -> None:
        """Looks once more at parameters and buffers: a buffer can be poisoned while every loss is finite, and one that
        was may have been written anew since, as a queue is: nothing is left of that."""
        self._read()
        with self._changing:
            self._look_back()

    def _look_back(self) -> None:
        if self._steps:
            self._steps[-1] = self._with_bad_tensors(self._steps[-1])
        if any(counts.kind == "buffer" for step in self._steps for counts in step.nonfinite):
            healed = {name for name, _ in self._model.named_buffers()}  # of a model that has gone nothing is known
            healed -= {counts.name for counts in nonfinite_in_model(self._model)}
            self._steps = [_but_for(healed, step) for step in self._steps]

    def _read(self) -> None:
        """Turns the unread steps into Steps, with one transfer for all of them."""
        with self._changing:
            unread, self._unread = self._unread, []
            values = iter(to_host([scalar for step in unread for scalar in step.scalars()]))
            made = [self._taken(self._step_of(step, values)) for step in unread]
        if self._on_step is not None:
            for step in made:
                self._on_step(step)

    def _step_of(self, ended: OpenStep, values: Iterator[float]) -> Step:
        step = ended.to_step(self.closed(), self._iteration, values, has_own_scale=self.has_own_scale)
        self.has_own_scale |= step.scale != 1.0 and not step.scaler
        return step

    def _iteration(self, optimizer: int) -> int:
        """How many steps of an optimizer have been read."""
        latest = self._latest.get(optimizer)
        return 0 if latest is None else latest.iteration + 1

    def _taken(self, step: Step) -> Step:
        """Adds a step that was read, with what else is to be known of it."""
        if step.skipped or not math.isfinite(step.loss):
            step = self._with_bad_tensors(step)
        step = self._with_few_groups(step)
        if self.journal is not None:
            self.journal.step(step)
        self._keep(step)
        return step

    def _keep(self, step: Step) -> None:
        """Adds a step; where they are too many, some go."""
        bad = {(counts.kind, counts.name, counts.nan > 0) for counts in step.nonfinite} - self._seen_bad
        self._seen_bad |= bad
        has_new_scale = step.scale != self._latest.get(step.optimizer, step).scale
        self._latest[step.optimizer] = step
        if bad or has_new_scale or not step.is_healthy:
            self._telling.add(step.step)
        if bad or step.groups:
            self._listed.add(step.step)
        self._steps.append(step)
        if len(self._steps) >= self._room:
            self._thin(step.step)

    def _thin(self, last: int) -> None:
        """Leaves out healthy steps that have no telling one beside them, and of too many telling ones stretches."""
        while (last + 1) // self._stride > MOST_STEPS // 4:
            self._stride *= 2
        while len(self._telling - self._listed) > MOST_TELLING:
            self._stretches *= 2
            self._telling = {number for number in self._telling if self._is_told(number, last)}
        every, self._steps = self._steps, [kept for kept in self._steps if self._stays(kept.step, last)]
        self._room = max(MOST_STEPS, 2 * len(self._steps))
        stay = {step.step for step in self._steps}
        self.left_out = self.left_out.and_these([step for step in every if step.step not in stay])
        if self.journal is not None:
            self.journal.thinned(self._steps)

    def _is_told(self, number: int, last: int) -> bool:
        return _is_at_end(number, last) or number in self._listed or number // STRETCH % self._stretches == 0

    def _stays(self, number: int, last: int) -> bool:
        beside = min(len(self._latest), MOST_TURNS)  # there is the step before it, or behind it, of its own optimizer
        is_beside_one_that_tells = not self._telling.isdisjoint(range(number - beside, number + beside + 1))
        return _is_at_end(number, last) or number % self._stride == 0 or is_beside_one_that_tells

    def _with_few_groups(self, step: Step) -> Step:
        """The step with its groups; only with their count once the record lists enough."""
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
        """Adds the parameters and buffers that are not finite: each once, at the first step that shows it."""
        found = nonfinite_in_model(self._model, "after", but=self._known_bad)
        self._known_bad |= {counts.name for counts in found}
        return replace(step, nonfinite=(*step.nonfinite, *found))


def _but_for(healed: Container[str], step: Step) -> Step:
    """The step without the buffers that it has poisoned for a while."""
    kept = tuple(one for one in step.nonfinite if one.kind != "buffer" or one.when != "after" or one.name not in healed)
    return step if kept == step.nonfinite else replace(step, nonfinite=kept)


def _is_at_end(number: int, last: int) -> bool:
    """A step is one of the first, or of the last so far."""
    return number < STEPS_AT_ENDS or last - number < STEPS_AT_ENDS
