"""Steps of a loop that is not ours: after a bad one the next is taped, captured, and run again where it is bad."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import torch

from ampdbg.diagnosis.scale import SKIPS_IN_A_ROW
from ampdbg.observer import Observer
from ampdbg.probes.unfollowed import is_compiled_code_there, is_in_compiled_call
from ampdbg.probes.watch import Watch
from ampdbg.quantities import counted, listed
from ampdbg.record.log import kept
from ampdbg.record.run import Investigation, Record, ScriptRun
from ampdbg.script.captures import Captures
from ampdbg.script.ranks import in_its_group
from ampdbg.script.traced_step import TracedStep

MOST_TRACED = 6
"""So many steps are traced at most, each of which takes several times as long as it would."""

REST = 10
"""So many healthy steps allow one more: the scale that collapses in the night has settled before."""

WAITS, SHARE = 60.0, 0.05
"""Seconds that a script may wait for steps that are run again, and the share of its time beyond them."""

LONGEST_GAP = 32
"""A bad step that comes so many steps after the last one has nothing to do with it."""

MOST_FOUND = 2
"""So many traced steps that went wrong are enough of each row of bad ones."""

SETTLES_ABOVE = 2.0**16 / 2**SKIPS_IN_A_ROW
"""A loss scale that settles mostly does so above it: a scaler begins at 2^16. Before that a loop with compiled code is
not traced: in a traced step such code runs as it was written, which rounds otherwise and draws other random numbers."""

NOT_COMPILED = "{} ran uncompiled to be traced: from there on compiled code of the script may have given other numbers"
"""As of a step that was to be captured."""

NOT_REACHED = "step {} was not captured: the script has made {}, counted from 0"
"""Of one that was asked for."""

NOT_RUN_AGAIN = "rank {} of {}: steps of a group are run again by ampdbg replay CAPTURE"


class TracedSteps:
    """Traces the next step when one has gone wrong, keeps what is found in it, and captures it.

    Args:
        watcher: of the loop.
        captures: where captures go.
        observer: told before a step is run again.
        investigates: a step that goes wrong is run again at once.
    """

    def __init__(self, watcher: Watch, captures: Captures, observer: Observer, *, investigates: bool = True) -> None:
        self.found: list[Investigation] = []
        self.captures = captures
        self._watcher = watcher
        self._observer = observer
        self._investigates = investigates
        self._left = MOST_TRACED
        self._in_a_row, self._healthy, self._bad, self._is_lost = 0, 0, 0, False
        self._uncompiled: list[int] = []
        self._since_bad, self._due, self._is_early = LONGEST_GAP, 0, False
        self._traced: TracedStep | None = None
        self._told: set[int] = set()
        """The optimizers, by ``id``, of whose turns in this row of bad steps replays have told."""
        self._started, self._waited = time.monotonic(), 0.0

    def step_ended(self, is_bad: bool) -> None:
        """To be called when a step has ended."""
        if is_bad or not self._healthy:  # a group is made before the first step, and may be gone at the end
            self.captures.start = in_its_group(self.captures.start)
        if is_bad and not self._is_lost and not math.isfinite(self._watcher.log.latest().loss):
            self._in_a_row, self._is_lost = 0, True  # the skips of a scale that settles tell nothing of it
        traced = self._traced
        if traced is not None and traced.goes_over(is_bad=is_bad):
            traced.next_begins()
        elif traced is not None:
            self.end()
            self._keep(traced)
        if not is_bad:
            self._in_a_row, self._is_lost, self._healthy = 0, False, self._healthy + 1
            self._told.clear()
            self._left = min(MOST_TRACED, self._left + (self._healthy % REST == 0))
        self._since_bad += 1
        if is_bad:
            # Of several optimizers one may fail at each of its turns: the next is as far away as the last was. A step
            # of another may end only when this one's forward pass is over: tracing begins a step early.
            self._bad = self._bad + 1 if self._since_bad == 1 else 1
            gap, self._since_bad = self._since_bad, 0
            self._due = gap if gap <= LONGEST_GAP else 1
            self._is_early = self._due > 1
            self._due -= self._is_early
        self._due -= 1
        self._next_begins()

    def _next_begins(self) -> None:
        """Traces the step that is about to begin, where it is due or asked for."""
        self.captures.begins(self._watcher.log.closed())
        if self._traced is not None and self.captures.take_request():
            self._traced.ask()
        is_due = self._due == 0 and self._left > 0 and self._in_a_row < MOST_FOUND
        if is_due and is_compiled_code_there() and self._may_settle():
            is_due = False
        # The step of one optimizer may take what was made before that of another.
        is_next_wanted = self.captures.wanted == self._watcher.log.closed() + 1 and len(self._watcher.optimizers) > 1
        if self._traced is None and (is_due or is_next_wanted or self.captures.is_wanted):
            self._begin(goes_on=is_next_wanted or (is_due and self._is_early), is_due=is_due)

    def _may_settle(self) -> bool:
        """Whether the bad steps up to the last may be those of a loss scale that settles."""
        last = self._watcher.log.latest()
        return self._bad < SKIPS_IN_A_ROW or (math.isfinite(last.loss) and last.scale > SETTLES_ABOVE)

    def _keep(self, traced: TracedStep) -> None:
        """Keeps what was found in a step that has ended."""
        self._waited += traced.waited
        step = self._watcher.log.latest()
        if traced.is_given_up or traced.has_failed:
            self.captures.is_wanted |= traced.is_wanted
        elif traced.passes_over and not traced.taken:  # the other's turn was sound, or could not be run again
            self._told.clear()
        elif step.found_inf or not math.isfinite(step.loss):
            self._in_a_row += 1
            self._told |= {traced.taken} if traced.taken else set()
            self.found[:] = kept([*self.found, traced.investigation(step)])

    def seen(self, record: Record, exit_code: int = 0) -> Record:
        """A record of the loop with what was traced and captured in it."""
        self.captures.start = in_its_group(self.captures.start)
        start, captures = self.captures.start, self.captures
        is_left = start.processes > 1 and bool(self.found)
        notes = [captures.why_not] * bool(captures.why_not)
        steps = self._watcher.log.closed()
        notes += [NOT_REACHED.format(captures.wanted, counted(steps, "step"))] * (captures.wanted >= steps > 0)
        notes += [NOT_COMPILED.format(listed([f"step {one}" for one in self._uncompiled]))] * bool(self._uncompiled)
        notes += [NOT_RUN_AGAIN.format(start.rank, start.processes)] * is_left
        written = tuple(map(str, captures.written))
        return replace(
            record,
            unseen=replace(record.unseen, notes=(*record.unseen.notes, *notes)),
            script=ScriptRun(
                start.name, start.arguments, start.is_module, exit_code, written, start.rank, start.processes
            ),
            investigations=tuple(self.found),
        )

    @property
    def is_tracing(self) -> bool:
        """Whether the step under way is traced."""
        return self._traced is not None

    def end(self) -> None:
        """Leaves torch and the models as they were."""
        traced, self._traced = self._traced, None
        if traced is not None:
            traced.end()

    def _begin(self, *, goes_on: bool, is_due: bool) -> None:
        # A mode of the script's own that is entered now would be left before ours: torch pops them in order. A step
        # that is run again takes the gradients of all models away for a while, also from loops of other threads.
        if torch._C._len_torch_dispatch_stack() or self._watcher.has_other_loops or is_in_compiled_call():
            return
        if is_compiled_code_there():
            self._uncompiled.append(self._watcher.log.closed())
        is_wanted = self.captures.take_request()
        self._left -= is_due and not is_wanted
        may_wait = self._investigates and self._waited <= WAITS + SHARE * (time.monotonic() - self._started)
        self._traced = TracedStep(
            self._watcher,
            self.captures,
            self._observer,
            may_wait=may_wait,
            goes_on=goes_on,
            passes_over=self._turns_told(),
        )
        if is_wanted:
            self._traced.ask()
        self._traced.begin()

    def _turns_told(self) -> frozenset[int]:
        """The optimizers of whose turns enough is told, where the last step had others too whose gradients were bad:
        with one scaler those may be the only ones that keep failing."""
        if not self._told:
            return frozenset()
        groups = {group.index for group in self._watcher.log.latest().groups}
        failing = {id(optimizer) for optimizer in self._watcher.optimizers.of(groups)}
        return frozenset(self._told) if failing - self._told else frozenset()
