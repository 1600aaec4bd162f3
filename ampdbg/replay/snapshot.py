"""The inputs of a replay of one step: its batches, and the earlier random state, buffers and attributes.

The weights are not copied in advance. A replay runs while the model still has the weights of the step: before the
optimizer writes them, or after the scaler withheld the step. Weights are copied only around the replay itself. The
batches are copied, because a step may write into them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ampdbg.probes.draws import Draws
from ampdbg.probes.module_calls import run_eagerly
from ampdbg.probes.seams import unwatched
from ampdbg.record.run import Investigation
from ampdbg.replay.copies import duplicate
from ampdbg.replay.packing import NotAtHandError, Packing, Tensors, Unpacking
from ampdbg.replay.random_state import RandomState
from ampdbg.replay.state import SavedContents, restored, saved_before_step, surroundings_restored, written
from ampdbg.workload.batches import tensor_leaves


@dataclass(frozen=True, eq=False)
class ModelState:
    """The state of a ``model`` before a step, without its weights; ``held`` restores it into the same objects."""

    held: SavedContents = field(default_factory=lambda: SavedContents({}))
    model: torch.nn.Module = field(default_factory=torch.nn.Module)

    @staticmethod
    def now(model: torch.nn.Module) -> ModelState:
        """Return the current state of the model."""
        return ModelState(saved_before_step(model), model)

    @property
    def buffers(self) -> Mapping[str, torch.Tensor]:
        """Copies of the buffers by name."""
        found = _buffers(self.model, self.held)
        return {name: self.held.copy_of(buffer) for name, buffer in found if buffer in self.held}

    def before(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the value of a parameter before the step: its own, or the copy if the forward pass wrote it."""
        return self.held.copy_of(weight) if weight in self.held else weight.detach()

    def packed(self, prefix: str = "attribute") -> PackedState:
        """Return the plain data of the state, for a rebuilt model: numbers, strings, tensors, arrays, generators of
        random numbers, and containers with such data.

        ``prefix`` begins the names of the tensors in attributes.
        """
        buffers = [one for _, one in _buffers(self.model, self.held)]
        packing, attributes = Packing(prefix, self.held.plain(but=buffers)), dict[str, dict[str, Any]]()
        for name, module in self.model.named_modules():
            attributes[name] = {}
            for key, value in self.held.attributes_of(module).items():
                with contextlib.suppress(KeyError, RecursionError):  # it refers to an object that only this model has
                    attributes[name][key] = packing.of(value)
        return PackedState(self.buffers, attributes, packing.tensors)


@dataclass(frozen=True, eq=False)
class PackedState:
    """The file form of the state of a model before a step; ``tensors`` are those in the packed ``attributes``."""

    buffers: Mapping[str, torch.Tensor]
    attributes: Mapping[str, Mapping[str, Any]]
    tensors: Tensors

    def unpacked(self, model: torch.nn.Module) -> ModelState:
        """Return this state for a rebuilt model, which stays unchanged. Entries that do not fit keep its own values."""
        device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
        unpacking, now = Unpacking(self.tensors, device), saved_before_step(model)
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


def _buffers(model: torch.nn.Module, held: SavedContents) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers that a model had, by name."""
    for name, module in model.named_modules():
        yield from ((f"{name}.{key}".lstrip("."), buffer) for key, buffer in held.buffers_of(module).items())


def _has_shape_of(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.is_nested and other.is_nested if one.is_nested or other.is_nested else one.shape == other.shape


@dataclass(frozen=True)
class Snapshot:
    """A step before its forward pass. ``batches`` has one entry for each micro-batch, on the device.

    The batches are copies that belong to the snapshot. ``data`` are the tensors in them from outside the step, by name.
    ``weights`` are copies of the model's parameters, in order, for a later replay. ``beside`` are called objects
    outside the model, such as a loss with a running mean. ``states_beside`` are their earlier states, if known.
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
    """The dtypes in which its dropouts draw, recorded in the first replay."""

    left: set[str] = field(default_factory=set)
    """The names in the user's code that replays did not restore, each with its file or class."""


def take_snapshot(model: torch.nn.Module, step: int, batches: tuple[Any, ...], *beside: Any) -> Snapshot:
    """Return the step that is about to run, with copies of its state and its batches."""
    copies = duplicate(batches)
    data = tuple(leaf for batch in copies for leaf in tensor_leaves(batch))
    return Snapshot(step, copies, data, RandomState.now(), ModelState.now(model), beside=beside)


@contextlib.contextmanager
def rewound(model: torch.nn.Module, snapshot: Snapshot) -> Iterator[None]:
    """Restore model, batches and random state from before the step while this is entered, but keep the current weights.

    Gradients are cleared. On exit everything is as on entry, including weights that the step wrote. Meanwhile no
    watcher records and nothing is compiled: the compiler would change its code for later steps.
    """
    random_state, states = RandomState.now(), (snapshot.state, *snapshot.states_beside)
    also = [one for state in states for one in state.held.values]
    held_apart = restored(model, *snapshot.beside, batches=snapshot.batches, also=also)
    with unwatched(), run_eagerly(), surroundings_restored(model, snapshot.left), held_apart:
        try:
            for state in states:
                state.held.restore()
            snapshot.random_state.restore()
            yield
        finally:
            random_state.restore()


@dataclass(frozen=True)
class FailingStep:
    """An investigated step with its loss scale; the snapshot has copies of its weights."""

    made: Investigation
    snapshot: Snapshot
    scale: float


def failing_step(model: torch.nn.Module, snapshot: Snapshot, scale: float, made: Investigation) -> FailingStep:
    """Return the failing step with the current weights. Call it while the model still has the weights of the step."""
    weights = tuple(snapshot.state.before(weight).clone() for weight in model.parameters())
    return FailingStep(made, replace(snapshot, weights=weights), scale)


@contextlib.contextmanager
def weights_of(model: torch.nn.Module, failing: FailingStep) -> Iterator[None]:
    """Give the model the weights of the step and no gradients while entered; restore both on exit."""
    with restored(*model.parameters()):
        with torch.no_grad():
            for weight, before in zip(model.parameters(), failing.snapshot.weights, strict=True):
                weight.copy_(before)
        yield
