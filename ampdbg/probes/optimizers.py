"""The optimizers of a loop: those that it was given, those that it makes itself, and their parameter groups."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile

import torch
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from ampdbg.probes.models import Models, alive_in_process
from ampdbg.probes.open_step import NormOfEach
from ampdbg.probes.tensors import Scalar, magnitude_of, scalar_of, total_norm
from ampdbg.record.run import GroupOverflow, ParameterCounts, Step

ROUNDED = 1e-3
"""How far apart the norms of weights and of their copies in half may be: bfloat16 rounds each by 2**-9 at most."""

COMMON = 0.02
"""The standard deviation that many models begin their weights with, GPT-2 and BERT among them."""


class Originals:
    """The weights of which an optimizer steps copies, in the shape of an optimizer; held weakly. The script copies
    their gradients, and the copies back: passes never write a gradient of its own."""

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        self._weights = tuple(map(weakref.ref, weights))

    @property
    def param_groups(self) -> list[dict[str, list[torch.Tensor]]]:
        """As of an optimizer, in one group."""
        return [{"params": [weight for one in self._weights if (weight := one()) is not None]}]


Stepped = Optimizer | Originals
"""What has groups of parameters, to which backward passes write gradients."""


class Optimizers:
    """The optimizers of one loop in the order in which they came.

    Args:
        models: name the parameters; those that an optimizer made later trains are added to them.
        given: kept alive. Those that are made later are held weakly.
    """

    def __init__(self, models: Models, given: Sequence[Optimizer]) -> None:
        self.device = next((value.device for _, value in models.named_parameters()), torch.device("cpu"))
        """Where the first model is, or else the first optimizer's first parameter."""
        self._models = models
        self._given = tuple(given)
        # By id: one of the user's own may have no hash.
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
        """The loop makes this one; its parameters may still be added."""
        self._made[id(optimizer)] = weakref.ref(optimizer)

    @property
    def are_learnt(self) -> bool:
        """None was made since, and the weights of all have been noted."""
        return not self._made and self._are_noted

    def learn(self) -> Iterator[Optimizer]:
        """Adds those that were made since, with the models that they train; yields each."""
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
        """What tells it from the others: they are numbered in the order in which they first step."""
        if optimizer not in self._numbers:
            self._numbers[optimizer] = next(self._stepped)
        return int(self._numbers[optimizer])

    def stepping_with(self, number: int, steps: Iterable[Step]) -> tuple[Optimizer, ...]:
        """The optimizer of this number, and those that have no steps of their own: others take turns with it."""
        of_others = {step.optimizer for step in steps} - {number}
        return tuple(one for one in self if self._numbers.get(one, number) not in of_others)

    def adopt(self, called: Sequence[torch.nn.Module]) -> None:
        """Takes the modules that the loop calls for its models, where the optimizers train none of their parameters:
        as where a loop with half weights keeps copies of them in FP32."""
        if self._known:
            self._models.adopt(called)

    def copying(self, weights: Sequence[torch.Tensor]) -> Iterator[Optimizer]:
        """Those that step copies of these weights, flat ones or each by itself: none of the weights is any optimizer's
        own, watched or not, and together they have as many elements and the same norm but for rounding. Their owners
        are the models from now on. On a GPU this syncs.
        """
        size, theirs = sum(weight.numel() for weight in weights), {id(weight) for weight in weights}
        owned = (weight for one in alive_in_process(Optimizer) for weight in stepped_by(one)) if size else ()
        if theirs.isdisjoint(map(id, owned)):
            for one in self:
                copies = stepped_by(one)
                if size == sum(weight.numel() for weight in copies) > 0 and _have_one_norm(copies, weights):
                    self._models.replace(copies, weights)
                    yield one

    def note_weights(self) -> None:
        """Keeps how large the weights are; to be called before they are stepped on. Not synced."""
        for one in self:
            if one not in self._began:
                self._began[one] = _norm_of_weights([one])
        self._are_noted = True

    @property
    def have_stepped(self) -> bool:
        """One of the loop's optimizers has been seen to step, or to be withheld from it."""
        return len(self._numbers) > 0

    @property
    def have_other_weights(self) -> bool:
        """The weights are finite no more, or not those that were noted. On a GPU this syncs."""
        began = [(one, float(self._began[one])) for one in self if one in self._began]
        return any(math.isfinite(norm) and float(_norm_of_weights([one])) != norm for one, norm in began)

    @property
    def weights_grew(self) -> float:
        """How many times as large the weights are as they were at first, by their 2-norm; 1 where that is not known.

        Those that began smaller than is common, as near zero, are taken to have begun ``COMMON``: they have to grow.
        On a GPU this syncs.
        """
        noted = [one for one in self if one in self._began]
        count = sum(weight.numel() for one in noted for weight in stepped_by(one))
        began = math.hypot(*(float(self._began[one]) for one in noted))
        common = COMMON * math.sqrt(count)
        grew = float(_norm_of_weights(noted)) / max(began, common) if began else math.nan
        return grew if math.isfinite(grew) else 1.0

    @property
    def groups(self) -> tuple[str, ...]:
        """The name of every parameter group; those of last time where all have gone with the function that trained."""
        groups = [group for optimizer in self for group in optimizer.param_groups]
        if groups:
            self._groups = tuple(group_name(group, index) for index, group in enumerate(groups))
        return self._groups

    def nonfinite_groups(self, optimizer: Optimizer, before: NormOfEach | None = None) -> tuple[GroupOverflow, ...]:
        """The groups of one optimizer that hold inf or NaN; ``before`` as of :func:`nonfinite_groups`."""
        others = takewhile(lambda other: other is not optimizer, self)
        names = {id(parameter): name for name, parameter in self._models.named_parameters()}
        return nonfinite_groups(optimizer, names, sum(len(other.param_groups) for other in others), before)


def stepped_by(optimizer: Stepped) -> list[torch.Tensor]:
    """The parameters of all its groups, in order."""
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def _have_one_norm(copies: Sequence[torch.Tensor], originals: Sequence[torch.Tensor]) -> bool:
    one, other = (float(total_norm([weight.detach() for weight in of]) or 0.0) for of in (copies, originals))
    return math.isclose(one, other, rel_tol=ROUNDED)


def _norm_of_weights(optimizers: Iterable[Optimizer]) -> Scalar:
    """The 2-norm of all that the optimizers train, not synced."""
    norm = total_norm(weight.detach() for one in optimizers for weight in stepped_by(one))
    return 0.0 if norm is None else scalar_of(norm)


def nonfinite_groups(
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    first_index: int = 0,
    before: NormOfEach | None = None,
) -> tuple[GroupOverflow, ...]:
    """The parameter groups that hold inf or NaN in a gradient.

    Args:
        optimizer: its groups are looked at in order; a group's ``"name"`` key, where there is one, names it.
        names: qualified parameter names by ``id``.
        first_index: the index of the optimizer's first group, when several optimizers are watched.
        before: the :func:`gradient_norms` from before anything touched the gradients. Those that were not finite
            then count, whatever clipping has made of them; of a rewritten one it is known that so many elements at
            least were not finite.
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
    """How many elements are infinite and NaN; of a gradient that was rewritten since, how many at least were."""
    if math.isfinite(norm):
        return 0, 0
    now = magnitude_of(gradient)
    if version is None or version == gradient._version:
        return now.inf, now.nan
    if math.isnan(norm):
        return 0, 1
    # Clipping by the norm makes NaN of inf and 0 of all else, unless a NaN was there: that spreads to all elements.
    return 1 if may_spread else max(1, now.inf + now.nan), 0


def group_name(group: Mapping[str, object], index: int) -> str:
    """What a parameter group is called: its ``"name"`` key, else its position."""
    return str(group.get("name") or f"group {index}")


def innermost(optimizer: Optimizer) -> Optimizer:
    """The optimizer that a wrapper, such as accelerate's, hands its steps to."""
    inner = getattr(optimizer, "optimizer", None)
    return innermost(inner) if isinstance(inner, Optimizer) else optimizer
