"""The optimizers of a loop, given by the caller or made by the loop itself, and their parameter groups."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile

import torch
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from ampdbg.probes.models import Models, live_in_process
from ampdbg.probes.open_step import NormOfEach
from ampdbg.probes.tensors import Scalar, magnitude_of, scalar_of, total_norm
from ampdbg.record.run import GroupOverflow, ParameterCounts, Step

ROUNDED = 1e-3
"""Relative tolerance between the norms of weights and of their half copies. bfloat16 rounds each by at most 2**-9."""

COMMON = 0.02
"""A usual standard deviation of initial weights; GPT-2 and BERT use it."""


class Originals:
    """Original weights in the form of an optimizer, for an optimizer that steps copies of the weights; held weakly.
    Backward passes write gradients only for the originals. The script moves gradients to the copies, and values
    back."""

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        self._weights = tuple(map(weakref.ref, weights))

    @property
    def param_groups(self) -> list[dict[str, list[torch.Tensor]]]:
        return [{"params": [weight for one in self._weights if (weight := one()) is not None]}]


Stepped = Optimizer | Originals
"""An object with parameter groups for which backward passes write gradients."""


class Optimizers:
    """The optimizers of one loop in the order in which the loop made or received them.

    Args:
        models: The source of parameter names. The models of optimizers made later are added.
        given: Kept alive. Optimizers made later are held weakly.
    """

    def __init__(self, models: Models, given: Sequence[Optimizer]) -> None:
        self.device = next((value.device for _, value in models.named_parameters()), torch.device("cpu"))
        """The device of the first model, or of the first optimizer's first parameter."""
        self._models = models
        self._given = tuple(given)
        # By id: a user's optimizer class may have no hash.
        self._made: dict[int, weakref.ref[Optimizer]] = {}
        self._known: weakref.WeakValueDictionary[int, Optimizer] = weakref.WeakValueDictionary()
        self._known.update((id(optimizer), optimizer) for optimizer in given)
        self._groups: tuple[str, ...] = ()
        self._numbers = WeakIdKeyDictionary()
        self._stepped = itertools.count()
        self._began = WeakIdKeyDictionary()
        self._are_noted = False

    def __iter__(self) -> Iterator[Optimizer]:
        return iter(list(self._known.values()))

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, optimizer: Optimizer) -> bool:
        return id(optimizer) in self._known

    def made(self, optimizer: Optimizer) -> None:
        """Register an optimizer that the loop has just made; its parameters may still be added."""
        self._made[id(optimizer)] = weakref.ref(optimizer)

    @property
    def are_learnt(self) -> bool:
        """True if no optimizer is waiting for :meth:`learn` and all initial weights are noted."""
        return not self._made and self._are_noted

    def learn(self) -> Iterator[Optimizer]:
        """Add the optimizers made since the last call and the models that they train; yield each optimizer."""
        while self._made:
            optimizer = self._made.popitem()[1]()
            if optimizer is None:
                continue
            parameters = stepped_by(optimizer)
            if parameters and optimizer not in self and not parameters[0].is_meta:
                self._models.learn(parameters)
                self.device = self.device if self._known else parameters[0].device
                self._known[id(optimizer)] = optimizer
                self._are_noted = False
                self._groups = self.groups
                yield optimizer

    def number_of(self, optimizer: Optimizer) -> int:
        """Return the number of an optimizer. Optimizers are numbered in the order in which they first step."""
        if optimizer not in self._numbers:
            self._numbers[optimizer] = next(self._stepped)
        return int(self._numbers[optimizer])

    def stepping_with(self, number: int, steps: Iterable[Step]) -> tuple[Optimizer, ...]:
        """Return the optimizer of this number and all optimizers without steps of their own. Optimizers with their own
        steps take turns with it."""
        of_others = {step.optimizer for step in steps} - {number}
        return tuple(one for one in self if self._numbers.get(one, number) not in of_others)

    def adopt(self, called: Sequence[torch.nn.Module]) -> None:
        """Use the called modules as the models if the optimizers train none of their parameters. An example is a loop
        with half weights and FP32 copies in the optimizer."""
        if self._known:
            self._models.adopt(called)

    def adopt_copies_of(self, weights: Sequence[torch.Tensor]) -> Iterator[Optimizer]:
        """Yield the optimizers that step copies of the weights, flat or one by one; their owners become the models.

        No optimizer in the process may own any of the weights. The copies must have as many elements as the weights,
        and the same norm except for rounding. On a GPU this syncs.
        """
        size, theirs = sum(weight.numel() for weight in weights), {id(weight) for weight in weights}
        owned = (weight for one in live_in_process(Optimizer) for weight in stepped_by(one)) if size else ()
        if theirs.isdisjoint(map(id, owned)):
            for one in self:
                copies = stepped_by(one)
                has_size = size == sum(weight.numel() for weight in copies) > 0
                if has_size and math.isclose(float(_norm_of(copies)), float(_norm_of(weights)), rel_tol=ROUNDED):
                    self._models.replace(copies, weights)
                    yield one

    def note_weights(self) -> None:
        """Record the norm of the weights before the first step. This does not sync."""
        for one in self:
            if one not in self._began:
                self._began[one] = _norm_of(stepped_by(one))
        self._are_noted = True

    @property
    def have_stepped(self) -> bool:
        """True if an optimizer of the loop has stepped, or a scaler has withheld a step."""
        return len(self._numbers) > 0

    @property
    def have_other_weights(self) -> bool:
        """True if the weights have changed since :meth:`note_weights`, or are not finite. On a GPU this syncs."""
        began = [(one, float(self._began[one])) for one in self if one in self._began]
        return any(math.isfinite(norm) and float(_norm_of(stepped_by(one))) != norm for one, norm in began)

    @property
    def weights_grew(self) -> float:
        """The 2-norm of the weights divided by their initial 2-norm; 1 if either is unknown. On a GPU this syncs.

        Initial weights below ``COMMON``, such as near zero, count as ``COMMON``, because they have to grow.
        """
        noted = [one for one in self if one in self._began]
        weights = [weight for one in noted for weight in stepped_by(one)]
        began = math.hypot(*(float(self._began[one]) for one in noted))
        common = COMMON * math.sqrt(sum(weight.numel() for weight in weights))
        grew = float(_norm_of(weights)) / max(began, common) if began else math.nan
        return grew if math.isfinite(grew) else 1.0

    @property
    def groups(self) -> tuple[str, ...]:
        """The name of every parameter group, or the last known names if all optimizers were freed with the training
        function."""
        groups = [group for optimizer in self for group in optimizer.param_groups]
        if groups:
            self._groups = tuple(group_name(group, index) for index, group in enumerate(groups))
        return self._groups

    def nonfinite_groups(self, optimizer: Optimizer, before: NormOfEach | None = None) -> tuple[GroupOverflow, ...]:
        """Return the groups of one optimizer with inf or NaN; ``before`` as for :func:`nonfinite_groups`."""
        others = takewhile(lambda other: other is not optimizer, self)
        names = {id(parameter): name for name, parameter in self._models.named_parameters()}
        return nonfinite_groups(optimizer, names, sum(len(other.param_groups) for other in others), before)


def stepped_by(optimizer: Stepped) -> list[torch.Tensor]:
    """Return the parameters of all groups of the optimizer, in order."""
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def _norm_of(weights: Iterable[torch.Tensor]) -> Scalar:
    """Return the 2-norm of weights, without a sync."""
    norm = total_norm(weight.detach() for weight in weights)
    return 0.0 if norm is None else scalar_of(norm)


def nonfinite_groups(
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    first_index: int = 0,
    before: NormOfEach | None = None,
) -> tuple[GroupOverflow, ...]:
    """Return the parameter groups with inf or NaN in a gradient.

    Args:
        optimizer: Its groups are checked in order. A group is named by its ``"name"`` key, if it has one.
        names: Qualified parameter names by ``id``.
        first_index: The index of the optimizer's first group, if several optimizers are watched.
        before: The :func:`gradient_norms` from before clipping. Gradients that were not finite then count, even if
            clipping has changed them. For a rewritten gradient the counts are lower bounds.
    """
    pairs = () if before is None else zip(before[0], before[1].tolist(), strict=True)
    known: dict[int, tuple[int | None, float]] = {name: (version, norm) for (name, version), norm in pairs}
    may_spread = any(math.isnan(norm) for _, norm in known.values())
    found = []
    for index, group in enumerate(optimizer.param_groups, start=first_index):
        parameters = []
        for position, parameter in enumerate(group["params"]):
            if parameter.grad is not None:
                version, norm = known.get(id(parameter), (None, math.nan))
                inf, nan = _nonfinite_counts(parameter.grad, version, norm, may_spread)
                if inf or nan:
                    name = names.get(id(parameter), f"parameter {position}")
                    parameters.append(ParameterCounts(name, inf, nan, parameter.numel()))
        if parameters:
            found.append(GroupOverflow(index, group_name(group, index), tuple(parameters)))
    return tuple(found)


def _nonfinite_counts(gradient: torch.Tensor, version: int | None, norm: float, may_spread: bool) -> tuple[int, int]:
    """Return how many elements are inf and NaN; for a gradient rewritten since, return lower bounds."""
    if math.isfinite(norm):
        return 0, 0
    now = magnitude_of(gradient)
    if version is None or version == gradient._version:
        return now.inf, now.nan
    if math.isnan(norm):
        return 0, 1
    # Clipping by an infinite norm turns inf into NaN and all else into 0. A NaN spreads to all elements.
    return 1 if may_spread else max(1, now.inf + now.nan), 0


def group_name(group: Mapping[str, object], index: int) -> str:
    """Return the ``"name"`` key of a parameter group, or its position."""
    return str(group.get("name") or f"group {index}")


def innermost(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer inside a wrapper such as accelerate's."""
    inner = getattr(optimizer, "optimizer", None)
    return innermost(inner) if isinstance(inner, Optimizer) else optimizer
