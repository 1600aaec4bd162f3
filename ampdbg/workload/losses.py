"""One step of the user's model on one batch, and its scalar losses, by the conventions of the config."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from ampdbg.errors import WorkloadError
from ampdbg.workload.targets import Found, a, first_problem

_MISSING = object()
_NEEDED = 'needed: a scalar tensor, or an output that carries one as .loss or ["loss"]'


@dataclass(frozen=True)
class StepFunction:
    """The step that turns a batch into losses.

    ``call`` takes the batch and its index and returns the result of the user's code. ``source`` names that code in
    messages. ``named`` selects the returned dicts in which every item is a loss: all, those without a ``"loss"``, or
    none. ``hint`` is the advice if no loss is found. ``of`` is the called user object besides the model. It may
    hold state that each step changes, such as a running mean.
    """

    source: str
    call: Callable[[Any, int], Any]
    named: Literal["all", "without loss", "none"] = "none"
    hint: str = ""
    of: Any = None


def choose_step(model: nn.Module, loss: Found | None, step: Found | None, device: torch.device) -> StepFunction:
    """Return the step: from ``step``, else ``loss``, else the model's ``training_step``, else the model's output."""
    if step is not None:
        function = step.bound(("model", "batch"))
        return StepFunction(step.named, lambda batch, index: function(model, batch), named="all", of=_owner(function))
    if loss is not None:
        return _by_loss(model, loss, device)
    if callable(getattr(model, "training_step", None)):
        return _by_training_step(model)
    return StepFunction(
        f"the model {type(model).__name__}",
        lambda batch, index: call_model(model, batch),
        hint=". Give a `loss`, loss(output, target), or a `step`, step(model, batch), in the config",
    )


def call_model(model: nn.Module, batch: Any) -> Any:
    """Call the model. Expand a dict by name; use a pair's inputs, expanded if a tuple; pass any other batch as is."""
    if isinstance(batch, Mapping):
        return model(**batch)
    inputs = batch[0] if is_pair(batch) else (batch,)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def is_pair(batch: Any) -> bool:
    """True for ``(inputs, target)``, even as a list: DataLoader's collation turns a tuple into a list."""
    return isinstance(batch, (tuple, list)) and len(batch) == 2


def _by_loss(model: nn.Module, loss: Found, device: torch.device) -> StepFunction:
    function = loss.bound(("output", "target"))
    if isinstance(function, nn.Module):
        function = function.to(device)

    def call(batch: Any, index: int) -> Any:
        if not is_pair(batch):
            raise loss.refuse(
                f"needs batches that are pairs (inputs, target), and the data gives {a(batch)}; "
                "write a `step` target, step(model, batch), for other batches"
            )
        return function(call_model(model, batch), batch[1])

    return StepFunction(f"{type(model).__name__} with the loss {loss.spec.target}", call, of=_owner(function))


def _owner(function: Any) -> Any:
    """Return the object that owns a callable. An object with ``__call__`` owns itself."""
    function = function.func if isinstance(function, functools.partial) else function
    return getattr(function, "__self__", function)


def _by_training_step(model: nn.Module) -> StepFunction:
    if getattr(model, "automatic_optimization", True) is False:
        raise WorkloadError(
            f"{type(model).__name__} optimizes by hand (automatic_optimization is False), which ampdbg cannot "
            "watch; write a `step` target, step(model, batch), that returns the losses"
        )
    training_step: Any = model.training_step
    taken = max(1, len(inspect.signature(training_step).parameters))
    return StepFunction(
        f"{type(model).__name__}.training_step",
        lambda batch, index: training_step(*(batch, index)[:taken]),
        named="without loss",
    )


def losses_in(output: Any, step: StepFunction) -> dict[str, torch.Tensor]:
    """Return the scalar losses in ``output`` by name, each of shape (). A single loss is called ``loss``.

    Raises:
        WorkloadError: ``output`` has no loss, or a loss that is not a scalar tensor or has no gradient.
    """
    named = _named(output, step)
    for name, value in named.items():
        problem = _why_no_loss(value)
        if problem:
            which = "the loss" if name == "loss" else f"the loss {name!r}"
            raise WorkloadError(f"{step.source}: {which} {problem}{step.hint}")
    return {name: value.reshape(()) for name, value in named.items()}


def _named(output: Any, step: StepFunction) -> Mapping[str, Any]:
    if isinstance(output, torch.Tensor):
        return {"loss": output}
    carried = getattr(output, "loss", _MISSING)
    if carried is not _MISSING:
        return {"loss": carried}
    items = output if isinstance(output, Mapping) else {}
    if "loss" in items and step.named != "all":
        return {"loss": items["loss"]}
    if items and step.named != "none":
        return {str(name): value for name, value in items.items()}
    keys = f" with the keys {', '.join(map(str, items))}" if items else ""
    raise WorkloadError(f"{step.source} returned {a(output)}{keys}; {_NEEDED}{step.hint}")


def _why_no_loss(value: Any) -> str | None:
    if value is None:
        return "is None; an output carries no loss when its batch has no labels"
    if not isinstance(value, torch.Tensor):
        return f"is {a(value)}; needed: a scalar tensor (.item() and float() cut it off from the model)"
    problems = {
        f"has the layout {str(value.layout)[6:]}; needed: a dense scalar, such as its .to_dense()": (
            value.layout is not torch.strided
        ),
        "is on the meta device, which holds no values; needed: a scalar of the device that the model is on": (
            value.device.type == "meta"
        ),
        f"has the shape {list(value.shape)}; needed: a scalar, such as its .mean()": value.numel() != 1,
        f"has the dtype {str(value.dtype)[6:]}; needed: a floating-point scalar": not value.is_floating_point(),
        "does not require a gradient; it was detached, computed under no_grad, or reaches no trainable parameter": (
            torch.is_grad_enabled() and not value.requires_grad
        ),
    }
    return first_problem(problems)
