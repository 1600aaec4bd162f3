"""Load a training checkpoint into model, optimizers, schedules and loss scaler, without running code from the file.

Each part is found under the names that training scripts and libraries use. One message lists all misfits.
"""

from __future__ import annotations

import functools
import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import BaseModel, BeforeValidator, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from torch.optim import Optimizer

from ampdbg.config.schema import CheckpointFiles, Config
from ampdbg.errors import WorkloadError, first_line
from ampdbg.quantities import listed
from ampdbg.workload.optimizers import Training, groups_of
from ampdbg.workload.user_code import UserCode

WEIGHTS = ("state_dict", "model_state_dict", "model")
"""Keys under which training scripts save the weights."""


class Part(NamedTuple):
    """A saved part other than the weights: its words in messages, a key that identifies it, and its names in files."""

    words: str
    mark: str
    names: list[str]


PARTS = {
    "optimizer": Part(
        "an optimizer", "param_groups", "optimizer optimizer_state_dict optimizer_states optimizers optim".split()
    ),
    "scaler": Part(
        "a loss scaler", "scale", "scaler scaler_state_dict grad_scaler amp_scaler MixedPrecision amp".split()
    ),
    "scheduler": Part(
        "a scheduler",
        "last_epoch",
        "scheduler scheduler_state_dict lr_scheduler lr_scheduler_state_dict lr_schedulers".split(),
    ),
}
"""The parts, by config key. Lightning uses the plurals and MixedPrecision, Apex uses amp."""

# Prefixes that DistributedDataParallel and torch.compile add to every name.
_WRAPPERS = ("module.", "_orig_mod.")


class Checkpoint:
    """The content of a config's checkpoint, or an empty checkpoint if the config has none.

    Raises:
        WorkloadError: a file cannot be read, holds more than tensors, or lacks the part for which it is given.
    """

    def __init__(self, config: Config) -> None:
        self._read: dict[Path, Any] = {}
        self._folder, given = config.folder, config.checkpoint
        self._model: tuple[Path, str] | None = None
        self._parts: dict[str, SavedPart] = {}
        if isinstance(given, Path):
            where = config.where("checkpoint")
            self._model, content = (given, where), self._content(given, where)
            for name, part in PARTS.items():
                if inside := _inside(content, part.names):
                    self._parts[name] = SavedPart(inside, f"{where}: the {name} in {given.name}")
        elif isinstance(given, CheckpointFiles):
            for name, files in ((name, files) for name, files in given if files):
                where = config.where(f"checkpoint.{name}")
                if name == "model":
                    self._model = files, where
                else:
                    self._parts[name] = self._part(PARTS[name], files if name != "scaler" else (files,), where)

    def load_model(self, model: nn.Module, user: UserCode) -> None:
        """Load the weights.

        Raises:
            WorkloadError: they do not fit the model.
            UserCodeError: the model's own loading hooks raised.
        """
        if self._model is None:
            return
        file, where = self._model
        state = _unwrapped(_state_dict(self._content(file, where), where, file))
        with user.running(f"{where}: loading {file.name} into the {type(model).__name__}"):
            problems = _load(model, state)
        if problems:
            lines = "\n  ".join(problems)
            raise WorkloadError(f"{where}: {file.name} does not fit the {type(model).__name__}\n  {lines}")

    def load_training(self, model: nn.Module, training: Training, grouping: str) -> tuple[str, ...]:
        """Load the optimizer and scheduler states. Return notes on missing and on unused states.

        Args:
            model: the owner of the optimizers' parameters.
            training: the optimizers and schedules to load into.
            grouping: the config's parameter grouping. The training script may have used another one.

        Raises:
            WorkloadError: they do not fit.
        """
        optimizer, scheduler = self._parts.get("optimizer"), self._parts.get("scheduler")
        if optimizer is not None:
            load = functools.partial(load_optimizer, model=model, grouping=grouping)
            optimizer.put_into(training.optimizers, "optimizers", load)
        known = [one for one in training.schedules if isinstance(one.scheduler, torch.optim.lr_scheduler.LRScheduler)]
        if scheduler is None:
            starts_over = optimizer is not None and any(one.every for one in known)
            note = "the checkpoint has no state of a learning-rate scheduler: the schedule starts over"
            return (note,) if starts_over else ()
        if not known:
            no_schedule = "the config names no scheduler, so the learning rate stays constant"
            return (f"{scheduler.where} is not used: {no_schedule}",)
        scheduler.put_into([one.scheduler for one in known], "schedulers", load_schedule)
        return ()

    def scaler(self) -> Mapping[str, Any] | None:
        """Return the loss scaler's state for ``GradScaler.load_state_dict``, converted from Apex if needed, or None.

        Raises:
            WorkloadError: the state is not valid.
        """
        saved = self._parts.get("scaler")
        if saved is None:
            return None
        first, *others = saved.states
        given = {} if others else _mapping(first)
        if apex := _mapping(given.get("loss_scaler0")):
            given = {**_APEX, "scale": apex.get("loss_scale"), "_growth_tracker": apex.get("unskipped")}
        try:
            return ScalerState.model_validate(given).model_dump(by_alias=True)
        except ValidationError as error:
            wrong = listed((str(item["loc"][0]) for item in error.errors()), most=5)
            raise saved.misfit(torch.amp.GradScaler, f"missing, or not allowed: {wrong}") from None

    def _content(self, file: Path, where: str) -> Any:
        if file not in self._read:
            self._read[file] = _read(self._folder / file, where)
        return self._read[file]

    def _part(self, part: Part, files: Sequence[Path], where: str) -> SavedPart:
        states: list[Any] = []
        for file in files:
            content = self._content(file, where)
            found = (content,) if part.mark in _mapping(content) else _inside(content, part.names)
            if not found:
                raise WorkloadError(
                    f"{where}: {file.name} holds no state of {part.words} but {_in_words(content)}; "
                    f"allowed: its state_dict(), at the top or under {', '.join(part.names)}"
                )
            states += found
        return SavedPart(tuple(states), f"{where}: {listed(file.name for file in files)}")


def _mapping(value: Any) -> Mapping[Any, Any]:
    """Return the value if it is a mapping, else an empty mapping."""
    return value if isinstance(value, Mapping) else {}


def _in_words(content: Any) -> str:
    keys = [f"{key!s:.80}" for key in _mapping(content)]
    return f"a {type(content).__name__}{' with the keys ' if keys else ''}{listed(keys, most=8)}"


def _inside(content: Any, names: Sequence[str]) -> tuple[Any, ...]:
    """Return the states of a part from a saved file. Return an empty tuple if all states are empty or missing."""
    for name in names:
        value = _mapping(content).get(name)
        states = value if isinstance(value, (list, tuple)) else (value,)
        inside = [inner for state in states for inner in _mapping(state).values()]
        if any(not isinstance(inner, (Mapping, list, tuple)) or inner for inner in inside):
            return tuple(states)
    return ()


def _read(path: Path, where: str) -> Any:
    try:
        if path.suffix == ".safetensors":
            return load_file(path, device="cpu")
        return torch.load(path, map_location="cpu", weights_only=True)
    except SafetensorError as error:
        raise WorkloadError(f"{where}: {path.name} is no safetensors file: {error}") from None
    except pickle.UnpicklingError:
        raise WorkloadError(
            f"{where}: {path.name} is damaged, or holds Python objects; allowed: tensors only. "
            "Save it again with torch.save(model.state_dict(), path)"
        ) from None
    except Exception as error:  # noqa: BLE001 - unpickling a file that is not a pickle can raise anything
        reason = first_line(error).rstrip(".")
        raise WorkloadError(
            f"{where}: {path.name} cannot be read; allowed: what torch.save wrote, or a .safetensors file ({reason})"
        ) from None


def _state_dict(content: Any, where: str, path: Path) -> Mapping[str, Any]:
    """Return the mapping of names to tensors, even if the training script saved more than that."""
    saved = _mapping(content)
    inner = next((saved[name] for name in WEIGHTS if isinstance(saved.get(name), Mapping)), saved)
    if not any(isinstance(value, torch.Tensor) for value in inner.values()):
        raise WorkloadError(
            f"{where}: {path.name} holds no state dict but {_in_words(content)}; "
            f"allowed: names to tensors, at the top or under {', '.join(WEIGHTS)}"
        )
    odd = [key for key in inner if not isinstance(key, str)]
    if odd:
        raise WorkloadError(f"{where}: {path.name} holds a tensor under {odd[0]!r:.80}; allowed: names to tensors")
    return dict(inner)


def _unwrapped(state: Mapping[str, Any]) -> Mapping[str, Any]:
    for wrapper in _WRAPPERS:
        if all(name.startswith(wrapper) for name in state):
            return _unwrapped({name[len(wrapper) :]: value for name, value in state.items()})
    return state


def _load(model: nn.Module, state: Mapping[str, Any]) -> list[str]:
    """Load the fitting tensors and describe the rest. A missing name is fine if its tensor is tied to a present one."""
    own = model.state_dict()
    tensors = {name: (value, own.get(name)) for name, value in state.items()}
    misshapen = {
        name: f"{name} ({list(given.shape)} in the file, {list(needed.shape)} in the model)"
        for name, (given, needed) in tensors.items()
        if isinstance(given, torch.Tensor) and isinstance(needed, torch.Tensor) and given.shape != needed.shape
    }
    fitting = {name: value for name, value in state.items() if name not in misshapen}
    result = model.load_state_dict(fitting, strict=False)
    loaded = {_memory(own[name]) for name in own if name in fitting}
    missing = [name for name in result.missing_keys if name not in misshapen and _memory(own.get(name)) not in loaded]
    found = (
        ("missing", missing),
        ("not in the model", list(result.unexpected_keys)),
        ("of another shape", list(misshapen.values())),
    )
    return [f"{len(names)} {problem}: {listed(names, most=4)}" for problem, names in found if names]


def _memory(value: Any) -> object:
    """Return a key that is equal for tied tensors only. A value that cannot be tied gets a unique key."""
    if not isinstance(value, torch.Tensor) or value.numel() == 0:
        return object()
    return value.data_ptr(), tuple(value.shape), value.stride()


# The states of optimizers, schedulers and the loss scaler: check them against the run and load them


@dataclass(frozen=True)
class SavedPart:
    """The states of one part of a checkpoint in order, and their source, as a message begins."""

    states: tuple[Any, ...]
    where: str

    def put_into(self, owners: Sequence[Any], noun: str, load: Callable[[Any, Any], None]) -> None:
        """Load each state into its owner; ``noun`` names the owners in messages.

        Raises:
            WorkloadError: the number of owners differs, or ``load`` raised because a state does not fit.
        """
        if len(self.states) != len(owners):
            counts = f"{len(self.states)} in the file, {len(owners)} in the run"
            raise self.misfit(type(owners[0]), f"another number of {noun}: {counts}")
        for owner, state in zip(owners, self.states, strict=True):
            try:
                load(owner, state)
            except Exception as error:  # noqa: BLE001 - a foreign file can make it raise anything
                raise self.misfit(type(owner), first_line(error)) from None

    def misfit(self, kind: type, problem: str) -> WorkloadError:
        alone = "to load the weights only: checkpoint: {model: FILE}"
        return WorkloadError(f"{self.where} does not fit the {kind.__name__}\n  {problem}\n  {alone}")


_IMPLEMENTATION_SETTINGS = ("foreach", "fused", "capturable", "differentiable")
"""Group settings that select how a step is computed, not its result. The run's own values are kept."""


def load_optimizer(optimizer: Optimizer, state: Any, model: nn.Module, grouping: str) -> None:
    """Load a state into an optimizer, including the settings of its groups, such as the learning rate.

    Args:
        optimizer: an optimizer of the run, over parameters of the model.
        state: the state from the file.
        model: gives the names of the parameters and their order in a script.
        grouping: the config's parameter grouping. A script's single group is converted to it.

    Raises:
        Exception: the state does not fit.
    """
    if not _is_optimizer_state(state):
        raise ValueError("it is no state_dict() of a torch optimizer")
    own, groups = optimizer.param_groups, state["param_groups"]
    is_by_config = [group["name"] for group in groups_of(model, grouping)] == [group["name"] for group in own]
    hint = ""
    if is_by_config:
        groups = _regrouped(groups, optimizer, model)
        hint = "; make it as the training script does: optimizer: {target: FILE.py:NAME}, a function of the model"
    given, needed = [len(group["params"]) for group in groups], [len(group["params"]) for group in own]
    if given != needed:
        counts = f"{_counts(given)} in the file, {_counts(needed)} in the run"
        raise ValueError(f"other parameter groups: {counts}{hint}")
    # Another kind of optimizer lacks some of the numbers. Flags are not compared: they vary between torch versions.
    numbers = [key for key, value in optimizer.defaults.items() if _is_numeric(value)]
    wrong = [key for key in numbers if not all(_is_numeric(group.get(key)) for group in groups)]
    if wrong:
        raise ValueError(f"settings that are missing, or no numbers: {listed(wrong, most=6)}")
    optimizer.load_state_dict(_fitted(state, groups, optimizer))
    _check_states(optimizer, {id(parameter): name for name, parameter in model.named_parameters()})


def _is_optimizer_state(state: Any) -> bool:
    """True if it has parameter groups, lists each parameter once, and has only mappings as their states."""
    try:
        ids = [index for group in state["param_groups"] for index in group["params"]]
        are_states = all(isinstance(of_parameter, Mapping) for of_parameter in state["state"].values())
        return are_states and set(state["state"]) <= set(ids) and 0 < len(set(ids)) == len(ids)
    except (AttributeError, LookupError, TypeError):
        return False


def _regrouped(groups: Sequence[Any], optimizer: Optimizer, model: nn.Module) -> Sequence[Any]:
    """Split the one group of ``Optimizer(model.parameters())`` into the run's groups. It may omit frozen parameters."""
    every = list(model.parameters())
    ids = [index for group in groups for index in group["params"]]
    trained = every if len(ids) == len(every) else [parameter for parameter in every if parameter.requires_grad]
    if len(groups) != 1 or len(ids) != len(trained):
        return groups
    by_parameter = {id(parameter): index for parameter, index in zip(trained, ids, strict=True)}
    return [
        {**groups[0], "params": [by_parameter[id(parameter)] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]


def _counts(sizes: Sequence[int]) -> str:
    if len(sizes) == 1:
        return f"one of {sizes[0]} parameters"
    return f"{len(sizes)} of {listed(map(str, sizes), most=4)} parameters"


def _is_numeric(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return bool(value) and all(map(_is_number, value))
    return _is_number(value)


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _fitted(state: Mapping[str, Any], groups: Sequence[Any], optimizer: Optimizer) -> dict[str, Any]:
    """Return the state in the optimizer's own layout. Settings that only the run's groups have are kept."""
    own = optimizer.state_dict()
    pairs = list(zip(groups, own["param_groups"], strict=True))
    index = {old: new for given, mine in pairs for old, new in zip(given["params"], mine["params"], strict=True)}
    kept = ("name", "params", *_IMPLEMENTATION_SETTINGS)
    return {
        **own,
        "state": {index[old]: value for old, value in state["state"].items() if old in index},
        "param_groups": [{**mine, **given, **{key: mine[key] for key in kept if key in mine}} for given, mine in pairs],
    }


def _check_states(optimizer: Optimizer, names: Mapping[int, str]) -> None:
    """Check a torch optimizer's state against a new optimizer's state after one step on the meta device.

    Raises:
        ValueError: an entry in a parameter's state is missing, or has another shape.
    """
    if not type(optimizer).__module__.startswith("torch.optim"):
        return
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    twins = {one: nn.Parameter(torch.empty_like(one, device="meta")) for one in parameters}
    groups = [
        {**group, **dict.fromkeys(_IMPLEMENTATION_SETTINGS, False), "params": [twins[one] for one in group["params"]]}
        for group in optimizer.param_groups
    ]
    for twin in twins.values():
        twin.grad = torch.empty_like(twin)
    like: Callable[..., Optimizer] = type(optimizer)
    try:
        other = like(groups)
        other.step()
    except Exception:  # noqa: BLE001 - the optimizer reads values, needs sparse gradients, or needs a closure
        return
    unlike = {
        names.get(id(one), "a parameter"): wrong
        for one, state in optimizer.state.items()
        if state
        and (wrong := [key for key, made in other.state[twins[one]].items() if not _is_like(state.get(key), made)])
    }
    for name, keys in unlike.items():
        more = f"; the same for {len(unlike) - 1} more parameters" if len(unlike) > 1 else ""
        raise ValueError(f"{listed(keys, most=4)} of {name}: missing, or of another shape{more}")


def _is_like(given: Any, made: Any) -> bool:
    if isinstance(made, torch.Tensor) and made.dim() > 0:
        return getattr(given, "shape", None) == made.shape
    return made is None or _is_numeric(given)


def load_schedule(scheduler: Any, state: Any) -> None:
    """Load a state into a scheduler, limited to the keys of the scheduler's own state.

    Raises:
        Exception: the state does not fit.
    """
    own, given = scheduler.state_dict(), _mapping(state)
    wrong = [key for key, value in own.items() if _is_numeric(value) and not _is_numeric(given.get(key))]
    missing = [key for key in wrong if not key.startswith("_")]  # private keys vary between torch versions
    if missing:
        raise ValueError(f"missing, or no numbers: {listed(missing, most=4)}")
    scheduler.load_state_dict({**own, **{key: given[key] for key in (own.keys() & given.keys()).difference(wrong)}})


def _finite(value: Any) -> float:
    if not _is_number(value) or not math.isfinite(value):
        raise ValueError("no finite number")
    return float(value)


_Finite = Annotated[float, BeforeValidator(_finite)]
_Whole = Annotated[int, BeforeValidator(lambda value: int(_finite(value)))]


class ScalerState(BaseModel):
    """The state of a GradScaler, with the valid range of each value."""

    scale: Annotated[_Finite, Field(gt=0)]
    growth_factor: Annotated[_Finite, Field(gt=1)]
    backoff_factor: Annotated[_Finite, Field(gt=0, lt=1)]
    growth_interval: Annotated[_Whole, Field(ge=1, lt=2**31)]
    growth_tracker: Annotated[_Whole, Field(ge=0, lt=2**31, alias="_growth_tracker")]


_APEX = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
"""The fixed settings of Apex's dynamic scaler (``apex/amp/scaler.py``)."""
