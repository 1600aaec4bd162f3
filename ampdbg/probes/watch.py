"""Watches any training loop and records a Step for all optimizers that step on the same losses; changes nothing.

For a healthy step the watcher reads only what the loop computes anyway. It learns without a sync that the scaler
withheld a step: the optimizer's pre-step hook did not run. Only then are the gradients examined, group by group. On a
GPU the losses are read when the scaler itself has just synchronized, and further numbers in bulk. Without a scaler no
step is withheld, so loss and gradient norm are read together before each step.
"""

from __future__ import annotations

import functools
import inspect
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from datetime import datetime, timezone
from functools import partial
from types import TracebackType
from typing import Any, Literal

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ampdbg.call_order import CallKind
from ampdbg.environment import environment_of
from ampdbg.errors import AmpdbgError
from ampdbg.precision.emulation import is_emulating
from ampdbg.probes.calls import Calls
from ampdbg.probes.dtype_contract import DtypeContract
from ampdbg.probes.gradients import Measures
from ampdbg.probes.guard import Guard
from ampdbg.probes.loss_graph import is_lowered, is_scaled_by_hand, last_factor, mark_scaled, scaler_marks
from ampdbg.probes.models import Models, live_in_process, outermost_owners
from ampdbg.probes.open_step import Loop, OpenStep, is_finite_scalar
from ampdbg.probes.optimizers import Optimizers, innermost
from ampdbg.probes.seams import Seam, are_meta, attached, is_in_backward, is_tracing, is_unwatched, unwatched
from ampdbg.probes.step_hooks import hook_own_step, hooked_steps, steps_around, steps_under_way
from ampdbg.probes.steps import StepLog
from ampdbg.probes.tensors import Scalar, scalar_of, tensors_in
from ampdbg.probes.unfollowed import uncompiled
from ampdbg.probes.update_ledger import UpdateLedger
from ampdbg.quantities import listed
from ampdbg.record.run import Misuse, Record, Step, Unseen

Original = Callable[..., Any]

ON_CPU = (
    "the emulated GPU's tensors are on the CPU: where code asks for tensor.device.type == 'cuda' before it lowers ops, "
    "they run in FP32; drop that condition, or run it on a GPU"
)
"""The note on a run in which nothing ran in half although a GPU was emulated."""

FEW_PASSES = 4
"""Check this many backward passes for a loop that scales its loss itself, or steps copies of weights."""

UNWATCHED = "from step {} on ampdbg noted nothing, because it failed itself: {}; please report it"
SEVERAL = "several threads run loops, so ampdbg does not judge the order of their calls"
UNSEEN = (
    "the weights change, but ampdbg saw no call of an optimizer's step. A loop may write weights itself, as in hooks "
    "of the backward pass: each pass then counts as a step, and none is compared with FP32"
)
LEFT = "replays may have changed {}: another thread of the script may use it, so they did not restore it"


class Watch:
    """The steps and misuses of a loop so far; made by :func:`watch`."""

    def __init__(
        self,
        model: torch.nn.Module | None,
        optimizers: Sequence[Optimizer],
        on_step: Callable[[Step], None] | None = None,
    ) -> None:
        self.guard = Guard()
        self.models = Models(model)
        self._learns = model is None
        self.optimizers = Optimizers(self.models, optimizers)
        self.log = StepLog(self.models, None if on_step is None else self.guard.for_callback(on_step))
        self.calls = Calls(self.log.closed)
        self.ledger = UpdateLedger(self.models)
        self.contract = DtypeContract(self.models, self.calls.computed)
        for optimizer in optimizers:
            self.calls.add_optimizer(optimizer)
        self._loop = Loop(set())
        self._measures = Measures(self._loop, self.optimizers, self.calls, self.log)
        self._learning = threading.RLock()
        self.left_by_replays: set[str] = set()
        self._interrupted = False
        self._clears_sound = self._scales_by_hand = self._writes_gradients = self._adds_in_copies = False
        self._writes_itself = False
        self._waiting: tuple[OpenStep, ...] = ()
        self.ended: Callable[[bool], None] = lambda is_bad: None
        """Called when a step ends; True means that it was withheld or repaired, or that its loss is not finite."""
        self.lost: Callable[[Optimizer | None], None] = lambda optimizer: None
        """Called for a loss that is known to be non-finite, before the optimizer writes the weights. None if the loop
        may write them itself."""
        self.withheld: Callable[[Optimizer], None] = lambda optimizer: None
        """Called for non-finite gradients of a finite loss, before the optimizer writes the weights. With a scaler it
        is called after the scaler has withheld the step. Gradients that the script has repaired count too."""
        self.gave_up: Callable[[], None] = lambda: None
        """Called if the gradients of a non-finite loss were cleared before any step. The open step has that loss."""
        self.went_backward: Callable[[Collection[int], Collection[int]], None] = lambda wrote, cleared: None
        """Called after a backward pass with two collections of optimizer places: gradients that the pass wrote, and
        gradients that were cleared before it."""
        self._declined = frozenset[int]()
        """The ``id`` of each scaler that the script itself disabled. Torch also disables one that lacks its GPU."""
        self._restoring: ExitStack | None = None
        self._created = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self._started = time.monotonic()

    def start(self) -> Watch:
        """Start watching, until :meth:`stop` or until the watch is freed; no effect if already started."""
        if self._restoring is None:
            # Torch's references do not keep the watch alive.
            alive = weakref.ref(self)
            notes = (partial(_hooked, alive, note) for note in (Watch._before_step, Watch._after_step))
            with ExitStack() as begun:  # Ctrl-C may come while this begins
                begun.enter_context(hooked_steps(*notes))
                begun.enter_context(attached(partial(_around, alive)))
                begun.callback(self.ledger.hooks.close)
                for optimizer in self.optimizers:
                    hook_own_step(optimizer)
                self._restoring = begun.pop_all()
            weakref.finalize(self, self._restoring.close).atexit = False
        return self

    def stop(self) -> None:
        """Restore torch, the optimizers and the model; a second call does nothing."""
        if self._restoring is not None:
            restoring, self._restoring = self._restoring, None
            with restoring:
                self.guard.run_hook(self._finish)

    def __enter__(self) -> Watch:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None:
            self._interrupted = isinstance(error, KeyboardInterrupt)
            self.calls.failed(error)
        self.stop()

    @property
    def steps(self) -> tuple[Step, ...]:
        return self.log.steps

    @property
    def open_step(self) -> OpenStep:
        """The step that this thread's loop has under way."""
        return self._loop.now

    @property
    def stepping(self) -> frozenset[int]:
        """The places of the optimizers that share the open step; empty if no losses are known to belong to them."""
        return frozenset(place for place, step in self._loop.open.items() if step is self._loop.now)

    @property
    def is_inside_a_step(self) -> bool:
        """True in a step hook if a step of an optimizer of the loop called the current step."""
        return any(optimizer in self.optimizers for optimizer in steps_around())

    @property
    def withholding(self) -> Optimizer | None:
        """The optimizer with non-finite gradients, where they are measured because the loop may withhold the step. On a
        GPU this syncs where the loop does."""
        of_each = self._loop.now.left_norms
        left = (one for one in self.optimizers if not is_finite_scalar(*of_each.get(id(one), [None])[-1:]))
        return next((one for one in left if self.calls.place_of(one) in self.stepping), None)

    @property
    def has_unseen_steps(self) -> bool:
        """True if the loop has written its weights itself and no optimizer has stepped. Then each backward pass counts
        as a step, until the next one finds its gradients cleared."""
        return self._writes_itself and not self.optimizers.have_stepped

    @property
    def has_other_loops(self) -> bool:
        """True if another live thread has trained, so that replays must not alter its model."""
        others = self._loop.trained - {threading.get_ident()}
        return any(thread.ident in others for thread in threading.enumerate())

    def learn(self) -> None:
        """Watch the optimizers made since the last call, with the models that they train."""
        if self.optimizers.are_learnt:
            return
        with self._learning:  # another thread may be adding its optimizer, which must be known afterwards
            for optimizer in self.optimizers.learn():
                self.calls.add_optimizer(optimizer)
                self.log.look_at_model()
            self.optimizers.note_weights()

    def _made(self, original: Original, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        result = original(optimizer, *args, **kwargs)
        if self._learns:
            self.optimizers.made(optimizer)
        return result

    @property
    def misuses(self) -> tuple[Misuse, ...]:
        """The calls in the wrong place so far; empty if loops in several threads mix their calls."""
        return self.calls.misuses if len(self._loop.trained) < 2 else ()

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks on what the steps and the ledger leave out."""
        notes = [*self.log.notes, *self.ledger.notes, *[UNSEEN] * self.has_unseen_steps]
        if len(self._loop.trained) > 1:
            notes.append(SEVERAL)
        if self.left_by_replays:
            notes.append(LEFT.format(listed(sorted(self.left_by_replays))))
        return tuple(notes)

    @property
    def is_in_fp32(self) -> bool:
        """True if nothing examined ran in half precision: autocast and scaler may be off, or have no effect here."""
        scaled_on = set(self.calls.scalers.values())
        # On a machine with a GPU a CUDA scaler is enabled, even if the weights are on the CPU.
        is_scaled = self.optimizers.device.type in scaled_on or (is_emulating() and "cuda" in scaled_on)
        return self.calls.graphs > 0 and not self.calls.lowered and not is_scaled

    def record(self) -> Record:
        """Return a record of the loop so far, not yet diagnosed; also after the loop has ended or raised."""
        device, in_fp32 = self.optimizers.device, self.is_in_fp32
        emulated = is_emulating() and device.type == "cpu"
        policy = "none" if in_fp32 else "cuda" if device.type == "cuda" or emulated else "native"
        seen = self.contract.seen
        scalers, declined = self.calls.scalers, self._declined
        may_be_on = emulated or torch.cuda.is_available()  # else torch disables the requested scaler
        is_asked = any(scalers.values()) or not (may_be_on or scalers.keys() <= declined)
        seen["asked"] |= {"GradScaler": "on"} if is_asked else {}
        return Record(
            command="watch",
            created=self._created,
            environment=environment_of(device, policy, emulated=emulated, notes=(ON_CPU,) * (emulated and in_fp32)),
            config={},
            verdict="inconclusive",
            steps=self.steps,
            left_out=self.log.left_out,
            scales_gradients=self.calls.scales_gradients,
            unseen=Unseen(notes=self.notes, since=self.log.closed() if self.failure else None),
            misuses=self.misuses,
            **seen,
            updates=self.ledger.seen,
            groups=self.optimizers.groups,
            interrupted=self._interrupted,
            error=self.failure,
            elapsed=round(time.monotonic() - self._started, 3),
        )

    @property
    def failure(self) -> str:
        """A sentence with the step from which nothing was recorded because the watcher failed; "" without a failure."""
        return UNWATCHED.format(self.log.closed(), self.guard.failure) if self.guard.failure else ""

    def check(self) -> None:
        """Raise AmpdbgError if one of ampdbg's own loops was not watched to its end, which invalidates the result."""
        if self.guard.failure:
            raise AmpdbgError(self.failure)

    @property
    def is_paused(self) -> bool:
        """True if nothing is recorded of this thread now."""
        return is_unwatched() or bool(self.guard.failure)

    def paused(self) -> AbstractContextManager[None]:
        return unwatched()

    def _scaler_made(self, original: Original, scaler: GradScaler, *args: Any, **kwargs: Any) -> None:
        original(scaler, *args, **kwargs)
        is_on = _SCALER.bind(scaler, *args, **kwargs).arguments.get("enabled", True)
        self._declined = (self._declined - {id(scaler)}) | ({id(scaler)} if not is_on else set())

    def _scale(self, original: Original, scaler: GradScaler, outputs: Any) -> Any:
        self.learn()
        self.calls.scalers[id(scaler)] = scaler._device if scaler.is_enabled() else ""
        result = original(scaler, outputs)
        if scaler.is_enabled():
            mark_scaled(outputs, result, scaler)
        return result

    def _unscale(self, original: Original, scaler: GradScaler, optimizer: Optimizer) -> Any:
        result = self._calling("unscale", original, scaler, optimizer)
        self._measures.unscaled(scaler, optimizer)
        if scaler.is_enabled() and not self._loop.is_inside_a_scaler_step:
            self.calls.unscaled(optimizer, scaler)
        return result

    def _step(self, original: Original, scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        around = [one for one in steps_under_way() if one in self.optimizers]
        for outer in around:
            self._loop.now.give_up_bare(id(outer))
        stepping = next((one for one in (optimizer, *around) if one in self.optimizers), None)
        if stepping is None:
            return self._calling("step", original, scaler, optimizer, *args, **kwargs)
        step = self.begin_step_of(stepping)
        step.scaler, step.number = scaler, self.calls.number_of(scaler)
        self._writes_gradients |= self.calls.place_of(stepping) in self.calls.rewritten()
        in_kernel = bool(getattr(optimizer, "_step_supports_amp_scaling", False))  # a fused kernel unscales itself
        divisor = step.loss_scale() if in_kernel else 1.0
        if in_kernel:
            self._measures.before_kernel(stepping, divisor)
        self._loop.fired.discard(id(optimizer))
        result = self._calling("step", original, scaler, optimizer, *args, **kwargs)
        step.stepped = True
        flags = scaler._found_inf_per_device(optimizer).values() if in_kernel else ()
        found_inf = in_kernel and any(self._measures.read(stepping, list(flags)))
        withheld = id(optimizer) not in self._loop.fired or found_inf
        if withheld:
            self._measures.after_withheld_step(stepping, divisor)
            self._measures.note_groups(stepping)
            if not step.skipped:
                self.withheld(stepping) if step.has_finite_loss() else self.lost(stepping)
        step.skipped |= withheld
        step.succeeds = step.succeeds or self.calls.succeeded_by(scaler, stepping)
        self.calls.by_optimizer("step", stepping, skipped=withheld)
        return result

    def _update(self, original: Original, scaler: GradScaler, *args: Any, **kwargs: Any) -> Any:
        if self._loop.now.stepped:
            self._loop.now.note_scale()
        result = self._calling("update", original, scaler, *args, **kwargs)
        self.calls.by_scaler("update", scaler)
        if self._loop.now.stepped:
            self._close()
        return result

    def _get_scale(self, original: Original, scaler: GradScaler) -> Any:
        if not self._loop.is_inside_a_scaler_step:
            self.calls.by_scaler("get_scale", scaler)
        return original(scaler)

    def _calling(self, kind: CallKind, original: Original, scaler: GradScaler, *args: Any, **kwargs: Any) -> Any:
        """Record an error that the scaler raises; an error inside ``step`` is recorded once."""
        try:
            return original(scaler, *args, **kwargs)
        except Exception as error:
            if kind == "step" or not self._loop.is_inside_a_scaler_step:
                self.calls.refused(kind, None if kind == "update" else args[0], scaler, error)
            raise

    def _backward(self, original: Original, roots: Any, *args: Any, **kwargs: Any) -> Any:
        """Watch autograd's only way into the engine: (roots, gradients, retain_graph, create_graph, inputs, ...)."""
        if is_in_backward() or are_meta(roots):  # inside the engine, or without values
            return original(roots, *args, **kwargs)
        self.learn()
        self._loop.trained.add(threading.get_ident())
        takes = () if kwargs.get("accumulate_grad", True) else args[3]
        if takes:
            self.calls.grad(roots, creates_graph=bool(args[2]))
            if not self.ends_in_weights(*args):
                return original(roots, *args, **kwargs)
        original = partial(self.ledger.in_a_pass, original)
        scaled = scaler_marks(roots)
        scaler = scaled[0].by if scaled else None
        losses = [mark.loss for mark in scaled] or list(map(scalar_of, tensors_in(roots)))
        self._loop.forget_early()
        if self._loop.now.stepped:  # new losses end a step that was already taken
            self._close()
        self._loop.add_losses(losses)
        if scaler is not None:
            self._loop.now.scaler, self._loop.now.number = scaler, self.calls.number_of(scaler)
        going = self._loop.now
        if not scaled:
            self._note_factor(roots)
        if len(self._loop.trained) > 1:  # further threads may write the gradients that would be compared
            self._loop.open.clear()
            return original(roots, *args, **kwargs)
        result = self.calls.backward(scaler, original, takes, roots, *args, **kwargs)
        going.factor = going.factor if self.calls.lowered else 1.0  # in FP32 alone it weights the loss
        self._went_backward(losses, result if takes else None)
        return result

    def ends_in_weights(self, starts: Any, keeps_graph: bool | None, creates_graph: bool, inputs: Any, *_: Any) -> bool:
        """True if ``autograd.grad`` with these arguments is the backward pass of a step. It takes gradients of weights,
        which the loop itself gives to the optimizer. It also frees the graph, so no other pass can follow."""
        self.learn()
        return not (keeps_graph or self._loop.now.running) and bool(self.calls.owners(inputs))

    def _went_backward(self, losses: list[Scalar], returned: Sequence[torch.Tensor | None] | None) -> None:
        passes = self.ledger.passes  # checked after passes 1, 2, 4, ... until a step
        if not self.optimizers.have_stepped and passes & (passes - 1) == 0:
            self._writes_itself = self._writes_itself or self.optimizers.have_other_weights
        if passes < FEW_PASSES and not self.calls.last_pass_places[0]:
            self._look_for_copies()
        wrote, cleared = self.calls.last_pass_places
        if self.log.has_named_losses:
            wrote, cleared = tuple(range(len(self.optimizers))), ()
        withholds = self._withholds if returned is None else self._is_left
        cleared = (*cleared, *filter(withholds, tuple(self._loop.open)))
        given_up = self._loop.went_backward(losses, wrote, cleared)
        # The loop itself may withhold their steps, or repair their gradients.
        for optimizer in self.optimizers if self._scales_by_hand or self._writes_gradients else ():
            self._measures.after_backward(optimizer, wrote, returned)
        self._loop.now.is_returned = returned is not None
        for step in given_up:
            if self._loop.now.is_returned or not step.is_returned:  # else a loss of meta-learning has used them
                self._give_up(step)
        self.went_backward(wrote, cleared)
        self._look_behind_a_pass(wrote)

    def _note_factor(self, roots: Any) -> None:
        """Note the factor of losses that no scaler has scaled, if the loop has a loss scale of its own."""
        if self.ledger.passes < FEW_PASSES:
            self._scales_by_hand = self._scales_by_hand or is_scaled_by_hand(roots)
        if self._scales_by_hand:
            self._loop.now.factor = last_factor(roots)

    def _look_behind_a_pass(self, wrote: Collection[int]) -> None:
        """Examine a step whose weights may be written next. ``wrote`` holds the places of optimizers with gradients."""
        step, may_write = self._loop.now, self._clears_sound or not self.optimizers.have_stepped
        if may_write and step.scaler is None and not step.has_finite_loss():
            self.lost(None)
        for optimizer in self.optimizers:
            if id(optimizer) == step.running:  # its closure has run, and it writes the weights next
                self._look_before_a_step(optimizer, step)
        if self.has_unseen_steps and not wrote:  # hooks of the pass have used and cleared the gradients
            self._end_waiting(self._loop.close())

    def _withholds(self, place: int) -> bool:
        """True if the loop has withheld the open step of an optimizer, though it has not just cleared its gradients.

        They are not finite, and the loop lowers its scale. Or it moved them to copies of the weights to check them, as
        it has never added any up there.
        """
        step, is_moved = self._loop.open[place], place in self.calls.last_moved
        is_lower = is_lowered(step.factor, self._loop.now.factor)
        is_sound = not (is_lower or (is_moved and not self._adds_in_copies)) or step.is_known_sound()
        self._adds_in_copies |= is_sound and is_moved
        return not is_sound and (is_lower or self.optimizers.have_stepped)

    def _is_left(self, place: int) -> bool:
        """True if the open step of an optimizer has ended: the loop can use no such gradients, or has used them."""
        return self.has_unseen_steps or not self._loop.open[place].is_known_sound()

    def _look_for_copies(self) -> None:
        """Find optimizers that step copies of the weights of a backward pass that wrote no optimizer's gradients. The
        weights are those of one model, or of all with gradients."""
        every = (one for module in live_in_process(torch.nn.Module) for one in module.parameters(recurse=False))
        owners = outermost_owners({id(one) for one in every if one.grad is not None}) if len(self.optimizers) else []
        for models in dict.fromkeys((tuple(owners), *((owner,) for owner in owners))):
            weights = {id(one): one for owner in models for one in owner.parameters() if one.requires_grad}
            for optimizer in self.optimizers.adopt_copies_of([*weights.values()]):
                self.calls.add_originals(optimizer, weights.values())

    def _give_up(self, step: OpenStep) -> None:
        """End a step without an update: all its gradients were cleared before any optimizer stepped."""
        if self.has_unseen_steps:
            self._end_waiting(step)
            return
        step.read_losses_aside()
        is_sound = step.is_known_sound()
        # A loop that clears the gradients of finite losses abandons no step: the pass has another purpose, as in SAM.
        # Neither does one that wrote its weights behind such a pass, before an optimizer's first step.
        self._clears_sound |= bool(self._waiting) or (is_sound and step.mark is None and self.optimizers.have_stepped)
        step.skipped = not (is_sound or self._clears_sound)
        if step.skipped:  # else the losses belong to no step
            if not step.is_known_finite():
                after, self._loop.now = self._loop.now, step
                try:
                    self.gave_up()
                finally:
                    self._loop.now = after
            self._end(step)

    def _end_waiting(self, *steps: OpenStep) -> None:
        """End the step in which the loop wrote its weights itself. ``steps`` wait until the next call: if an optimizer
        steps meanwhile, the loop wrote the weights for another purpose. A scaler may withhold its steps unseen."""
        known = tuple(one for one in steps if one.backward_losses and one.scaler is None)
        waiting, self._waiting = self._waiting, known
        for step in waiting:
            self._end(step)

    def _clip(self, original: Original, *args: Any, **kwargs: Any) -> Any:
        """Watch ``clip_grad_norm_(parameters, max_norm, ...)`` or ``clip_grad_value_(parameters, clip_value, ...)``."""
        names = ("parameters", "clip_value" if "clip_value" in kwargs else "max_norm")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if not all(name in given for name in names):
            return original(*args, **kwargs)
        parameters, limit = (given.pop(name) for name in names)
        listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if "max_norm" in names and type(limit) in (int, float) and limit > 0.0:
            self.calls.clip_grad_norm = float(limit)
        self._measures.before_clipping(listed)
        return self.calls.clipped(lambda: original(listed, limit, *args[2:], **given), listed, limit)

    def _schedule(self, original: Original, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls.scheduled(scheduler, *args, *kwargs.values())
        return original(scheduler, *args, **kwargs)

    def _before_step(self, optimizer: Optimizer, has_closure: bool) -> None:
        self._loop.fired.add(id(optimizer))
        if has_closure:
            self.learn()  # the loop's first backward pass runs in the closure, inside this step
        if optimizer not in self.optimizers:
            return
        if not self._loop.is_inside_a_scaler_step:
            self._before_bare_step(optimizer, has_closure)
        elif self._measures.steps_despite_nonfinite_loss(optimizer):
            # A non-finite loss may have finite gradients, as the mean over no target has. No scaler withholds its step.
            self.lost(optimizer)
        elif self._measures.are_repaired(optimizer):
            self.withheld(optimizer)
        if not has_closure:  # the closure makes the gradients
            self.ledger.before(optimizer)

    def _inside_a_step(self, optimizer: Optimizer) -> None:
        """Handle the hooks before and after a step that is part of an outer step."""
        self._loop.fired.add(id(optimizer))
        self.contract.inside(optimizer)

    def _before_bare_step(self, optimizer: Optimizer, has_closure: bool) -> None:
        step = self.begin_step_of(optimizer)
        if step.stepped and (has_closure or id(optimizer) in step.bare_step_facts):  # a closure computes its own losses
            self._close()
            step = self.begin_step_of(optimizer)
        rewritten = self.calls.rewritten()
        if not has_closure:  # the closure makes the gradients
            self._writes_gradients |= self.calls.place_of(optimizer) in rewritten
            self._look_before_a_step(optimizer, step)
        bad = self.calls.is_unscaled(optimizer) and not self._measures.are_finite(optimizer)
        step.begin_bare(id(optimizer), skipped=bad, rewritten=rewritten)

    def _look_before_a_step(self, optimizer: Optimizer, step: OpenStep) -> None:
        """Examine losses and gradients before an optimizer steps without a scaler. On a GPU this syncs once."""
        is_scaled = step.scaler is not None and self.calls.scaler_of(optimizer) is not None
        self._measures.take(optimizer, step.loss_scale() if is_scaled else 1.0, may_change=False)
        self._measures.read(optimizer)
        if step.scaler is not None:
            return
        if step.bare_step_facts.keys() <= {id(optimizer)} and not step.is_known_finite():
            self.lost(optimizer)
        elif self._measures.are_repaired(optimizer) or not self._measures.are_finite(optimizer):
            self.withheld(optimizer)

    def _written(self, original: Original, optimizer: Optimizer) -> None:
        original(optimizer)
        self.ledger.written(optimizer)

    def _after_step(self, optimizer: Optimizer, _: bool) -> None:
        self.ledger.after(optimizer, self.log.closed())
        if optimizer not in self.optimizers:
            return
        self.contract.after(optimizer)
        step = self._loop.now
        if self._loop.is_inside_a_scaler_step or id(optimizer) not in step.bare_step_facts:
            return
        self.calls.by_optimizer("bare step", optimizer, **step.bare_step_facts[id(optimizer)])
        step.stepped, step.running = True, 0
        self._measures.take(optimizer, 1.0)
        if not self._measures.are_finite(optimizer):
            self._measures.note_groups(optimizer)
        if step.scaler is None and step.bare_step_facts.keys() == set(map(id, self.optimizers)):
            self._close()

    def begin_step_of(self, optimizer: Optimizer) -> OpenStep:
        """Return the open step of an optimizer that is about to step. End a different step that was already taken. The
        step gets the number of its first optimizer."""
        step = self._loop.step_of(self.calls.place_of(optimizer))
        if self._loop.now.stepped and step is not self._loop.now:
            self._close()
        self._loop.now = step
        step.optimizer = self.optimizers.number_of(optimizer) if step.optimizer is None else step.optimizer
        return step

    def _close(self) -> None:
        self._end(self._loop.close())

    def _end(self, step: OpenStep) -> None:
        self.log.close(step)
        self.ended(step.skipped or step.repaired or not step.is_known_finite())

    def nonfinite_in_open_step(self, *, is_cut: bool) -> Literal["loss", "gradients"] | None:
        """Return what is non-finite after a backward pass if no optimizer has stepped yet, else None. Gradients count
        only if the script's end cuts the step (``is_cut``), and mark it as skipped. On a GPU this syncs."""
        step = self._loop.now
        if step.stepped or not step.backward_losses:
            return None
        if not step.has_finite_loss():
            return "loss"
        if not is_cut:
            return None
        stepping = [one for one in self.optimizers if self._loop.open.get(self.calls.place_of(one)) is step]
        for optimizer in stepping:
            self._measures.take(optimizer, step.loss_scale(), may_change=False)
        bad = [one for one in stepping if not self._measures.are_finite(one)]
        for optimizer in bad:
            self._measures.note_groups(optimizer)
        step.skipped |= bool(bad)
        return "gradients" if bad else None

    def _finish(self) -> None:
        self.ledger.pause()
        if not self.guard.failure:
            step = self._loop.now
            # A loop without a scaler may check its loss or its gradients itself.
            is_sound = step.has_finite_loss() and step.has_left_finite()
            step.skipped |= not (step.stepped or self.has_unseen_steps or is_sound)
            if step.skipped or (step.bare_step_facts and step.stepped):
                self._close()
            elif self.has_unseen_steps:
                self._end_waiting(self._loop.close())
                self._end_waiting()
            self.log.finish()


def watch(
    model: torch.nn.Module,
    optimizers: Optimizer | Sequence[Optimizer],
    on_step: Callable[[Step], None] | None = None,
) -> Watch:
    """Watch any training loop over these optimizers, as :func:`ampdbg.watch` does, without captures.

    The watch also stops without ``stop()`` when it is freed.

    Raises:
        TypeError: The arguments are not a model and optimizers.
    """
    several = list(optimizers) if isinstance(optimizers, Iterable) else [optimizers]
    allowed = "watch(model, optimizer) or watch(model, [optimizer, ...])"
    for given, kind in [(model, torch.nn.Module), *((optimizer, Optimizer) for optimizer in several)]:
        if not isinstance(given, kind):
            raise TypeError(f"got a {type(given).__name__} instead of a {kind.__name__}; allowed: {allowed}")
    if not several:
        raise TypeError(f"got no optimizer, whose steps ampdbg watches; allowed: {allowed}")
    return Watch(model, [innermost(optimizer) for optimizer in several], on_step)


def _around(alive: weakref.ref[Watch], seam: Seam, original: Original, *args: Any, **kwargs: Any) -> Any:
    """Run a torch function that the loop has called; a watch that is still alive records the call."""
    watch = alive()
    if watch is None or seam not in _AROUND:
        return original(*args, **kwargs)
    call, inside = (seam, id(args[0]) if args else 0), watch._loop.inside
    # A subclass of a scaler or scheduler may call the method that it overrides: only the outer call counts.
    if watch.is_paused or call in inside or (seam in _SKIPPED_IF_DISABLED and not args[0].is_enabled()):
        return original(*args, **kwargs)
    inside.append(call)
    try:
        return watch.guard.around(_AROUND[seam], watch, original, *args, **kwargs)
    finally:
        inside.pop()


@uncompiled
def _hooked(alive: weakref.ref[Watch], note: Original, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    """Handle the hook before or after every step of an optimizer. Before a step with a closure, return arguments with a
    wrapped closure. The ledger runs after the closure, which makes the gradients."""
    watch = alive()
    if watch is None or watch.is_paused or is_tracing():
        return None
    if watch.is_inside_a_step:
        watch.guard.run_hook(Watch._inside_a_step, watch, optimizer)
    else:
        closures = [one for one in (*args[1:], *kwargs.values()) if callable(one)]
        watch.guard.run_hook(note, watch, optimizer, bool(closures))
        if closures and note is Watch._before_step:
            follow = partial(_followed, alive, optimizer)
            return tuple(map(follow, args)), {name: follow(value) for name, value in kwargs.items()}
    return None


def _followed(alive: weakref.ref[Watch], optimizer: Optimizer, closure: Any) -> Any:
    """Return a closure that calls the ledger once the gradients exist; return anything else unchanged."""
    if not callable(closure) or closure is optimizer:
        return closure

    @functools.wraps(closure)
    def followed(*args: Any, **kwargs: Any) -> Any:
        result, watch = closure(*args, **kwargs), alive()
        if watch is not None and not watch.is_paused and optimizer in watch.optimizers:
            watch.guard.run_hook(watch.ledger.before, optimizer)
        return result

    return followed


_SCALER = inspect.signature(GradScaler.__init__)

_SKIPPED_IF_DISABLED = ("step", "update", "get_scale")
"""These methods do nothing in a disabled scaler, so its loop counts as a loop without a scaler."""

_AROUND: Mapping[Seam, Original] = {
    "scale": Watch._scale,
    "unscale_": Watch._unscale,
    "step": Watch._step,
    "update": Watch._update,
    "get_scale": Watch._get_scale,
    "engine": Watch._backward,
    "clip": Watch._clip,
    "written": Watch._written,
    "schedule": Watch._schedule,
    "scaler": Watch._scaler_made,
    "optimizer": Watch._made,
    "cast": lambda watch, *args, **kwargs: watch.contract.cast(*args, **kwargs),
    "average": lambda watch, *args, **kwargs: watch.contract.averaged(*args, **kwargs),
}
