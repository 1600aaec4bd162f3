"""What a step needs to be run again: its batches, the random state, buffers and attributes from before it.

The weights are not copied for it: a replay is made while they are still those of the step, before the optimizer
has written them or after the scaler has withheld it. Only around the replay itself there is a copy of them. The
batches are copied, as a step may write into them.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ampdbg.probes.draws import Draws
from ampdbg.probes.module_calls import run_eagerly
from ampdbg.probes.pause import unwatched
from ampdbg.probes.tensors import leaves_of
from ampdbg.record.run import Investigation
from ampdbg.replay.copies import duplicate
from ampdbg.replay.packing import NotAtHandError, Packing, Tensors, Unpacking
from ampdbg.replay.random_state import RandomState
from ampdbg.replay.run import Run
from ampdbg.replay.state import Held, held_before_a_step, restored, surroundings_restored, written


@dataclass(frozen=True, eq=False)
class ModelState:
    """What a step found in a ``model`` besides its weights: ``held`` is restored into its very objects."""

    held: Held = field(default_factory=lambda: Held({}))
    model: torch.nn.Module | None = None

    @staticmethod
    def now(model: torch.nn.Module) -> ModelState:
        """What it is at this moment."""
        return ModelState(held_before_a_step(model), model)

    @property
    def buffers(self) -> Mapping[str, torch.Tensor]:
        """Copies of the buffers by name."""
        found = _buffers(self.model, self.held) if self.model is not None else ()
        return {name: self.held.copy_of(buffer) for name, buffer in found if buffer in self.held}

    def before(self, weight: torch.Tensor) -> torch.Tensor:
        """What a parameter of the model was: its own values, but where the forward pass has written it."""
        return self.held.copy_of(weight) if weight in self.held else weight.detach()

    def packed(self, prefix: str = "attribute") -> PackedState:
        """The same for a model that is built anew, as far as it is plain data: numbers, strings, tensors, arrays,
        generators of random numbers, and containers of them.

        ``prefix`` is what the names of tensors in attributes begin with.
        """
        model = torch.nn.Module() if self.model is None else self.model
        buffers = [one for _, one in _buffers(model, self.held)]
        packing, attributes = Packing(prefix, self.held.plain(but=buffers)), dict[str, dict[str, Any]]()
        for name, module in model.named_modules():
            attributes[name] = {}
            for key, value in self.held.attributes_of(module).items():
                with contextlib.suppress(KeyError, RecursionError):  # it leads to what only this model can have
                    attributes[name][key] = packing.of(value)
        return PackedState(self.buffers, attributes, packing.tensors)


@dataclass(frozen=True, eq=False)
class PackedState:
    """What a step found in a model, as it is written to a file: ``tensors`` are those in the packed ``attributes``."""

    buffers: Mapping[str, torch.Tensor]
    attributes: Mapping[str, Mapping[str, Any]]
    tensors: Tensors

    def unpacked(self, model: torch.nn.Module) -> ModelState:
        """The same of a model that was built anew, which stays as it is; what fits nothing that this has is its own."""
        device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
        unpacking, now = Unpacking(self.tensors, device), held_before_a_step(model)
        try:
            for name, buffer in model.named_buffers():
                if name in self.buffers and _has_shape_of(self.buffers[name], buffer):
                    written(buffer.data, self.buffers[name])
            for name, module in model.named_modules():
                for key, packed in self.attributes.get(name, {}).items():
                    with contextlib.suppress(NotAtHandError):
                        vars(module)[key] = unpacking.of(packed, vars(module).get(key))
            return ModelState.now(model)
        finally:
            now.restore()


def _buffers(model: torch.nn.Module, held: Held) -> Iterator[tuple[str, torch.Tensor]]:
    """Those that a model had, by name."""
    for name, module in model.named_modules():
        yield from ((f"{name}.{key}".lstrip("."), buffer) for key, buffer in held.buffers_of(module).items())


def _has_shape_of(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.is_nested and other.is_nested if one.is_nested or other.is_nested else one.shape == other.shape


@dataclass(frozen=True)
class Snapshot:
    """A step as it was before its forward pass. ``batches`` has one entry a micro-batch, on the device.

    They are copies that belong to the snapshot. ``data`` are the tensors in them that come from outside of the step,
    by name. ``weights`` are copies of the model's parameters, in order, where the step is to be run again later.
    ``beside`` are objects that it calls and the model does not have, such as a loss with a running mean;
    ``states_beside`` is what those that are modules held, where it is known.
    """

    step: int
    batches: tuple[Any, ...]
    data: tuple[tuple[str, torch.Tensor], ...]
    random_state: RandomState
    state: ModelState = field(default_factory=ModelState)
    weights: tuple[torch.Tensor, ...] = ()
    beside: tuple[Any, ...] = ()
    states_beside: tuple[ModelState, ...] = ()
    draws: Draws = field(default_factory=Draws)
    """What its dropouts draw from, noted when it is first run again."""

    left: set[str] = field(default_factory=set)
    """Names of the user's that were not restored when it was run again, each with where it stands."""


def take_snapshot(model: torch.nn.Module, step: int, batches: tuple[Any, ...], *beside: Any) -> Snapshot:
    """The step that is about to run; its state and its batches are copied."""
    copies = duplicate(batches)
    data = tuple(leaf for batch in copies for leaf in leaves_of(batch))
    return Snapshot(step, copies, data, RandomState.now(), ModelState.now(model), beside=beside)


@contextlib.contextmanager
def rewound(model: torch.nn.Module, snapshot: Snapshot) -> Iterator[None]:
    """Model, batches and random state as they were before the step, but for the weights, which are those of now.

    Gradients are cleared. Afterwards all is as it is now, the weights too, should the step write into them. No watch
    notes what is done meanwhile, and nothing is compiled: the compiler would choose other code for steps to come.
    """
    random_state, states = RandomState.now(), (snapshot.state, *snapshot.states_beside)
    also = [one for state in states for one in state.held.values]
    held_apart = restored(model, *snapshot.beside, batches=snapshot.batches, also=also)
    with unwatched(), run_eagerly(), surroundings_restored(snapshot.left), held_apart:
        try:
            for state in states:
                state.held.restore()
            snapshot.random_state.restore()
            yield
        finally:
            random_state.restore()


@dataclass(frozen=True)
class FailingStep:
    """A step that was investigated, with its loss scale; its snapshot has the weights that it had."""

    made: Investigation
    snapshot: Snapshot
    scale: float


def failing_step(model: torch.nn.Module, snapshot: Snapshot, scale: float, made: Investigation) -> FailingStep:
    """The step with the weights that the model has now: to be called while those are still the step's."""
    weights = tuple(snapshot.state.before(weight).clone() for weight in model.parameters())
    return FailingStep(made, replace(snapshot, weights=weights), scale)


@contextlib.contextmanager
def weights_of(model: torch.nn.Module, failing: FailingStep) -> Iterator[None]:
    """The model has the weights of the step, and no gradients; afterwards those that it has now."""
    with restored(*model.parameters()):
        with torch.no_grad():
            for weight, before in zip(model.parameters(), failing.snapshot.weights, strict=True):
                weight.copy_(before)
        yield


def further_steps(run: Run, failing: FailingStep, count: int) -> Iterator[Snapshot]:
    """The failing step on the batches that come after its own in the data, ``count`` times."""
    micro = len(failing.snapshot.batches)
    batches = itertools.islice(run.workload.batches(), (failing.snapshot.step + 1) * micro, None)
    for _ in range(count):
        taken = tuple(itertools.islice(batches, micro))
        if len(taken) < micro:  # a script's step has none but its own
            return
        yield replace(failing.snapshot, batches=taken, random_state=RandomState.now())
