"""A training checkpoint: read without running code of it, and put into model, optimizers, schedules and loss scaler.

Each part is found under the names that training scripts and libraries give it; what does not fit is said in one
message.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from torch.optim import Optimizer

from ampdbg.config.schema import CheckpointFiles, Config
from ampdbg.errors import WorkloadError, first_line
from ampdbg.quantities import listed
from ampdbg.workload.optimizers import Schedule, Training, groups_of
from ampdbg.workload.user_code import UserCode

Part = Literal["optimizer", "scaler", "scheduler"]

_NESTINGS: Mapping[str, tuple[str, ...]] = {
    "model": ("state_dict", "model_state_dict", "model"),
    "optimizer": ("optimizer", "optimizer_state_dict", "optimizer_states", "optimizers", "optim"),
    "scaler": ("scaler", "scaler_state_dict", "grad_scaler", "amp_scaler", "MixedPrecision", "amp"),
    "scheduler": ("scheduler", "scheduler_state_dict", "lr_scheduler", "lr_scheduler_state_dict", "lr_schedulers"),
}
"""Where training scripts, Lightning (plurals, MixedPrecision) and Apex (amp) put each part within what they save."""

_MARKS: Mapping[Part, str] = {"optimizer": "param_groups", "scaler": "scale", "scheduler": "last_epoch"}
"""The key by which the state of each part is known that is no part of something larger."""

# What DistributedDataParallel and torch.compile put before every name.
_WRAPPERS = ("module.", "_orig_mod.")


class Checkpoint:
    """The checkpoint that a config names, read; an empty one where it names none.

    Raises:
        WorkloadError: a file cannot be read, holds more than tensors, or has nothing of the part that it is given for.
    """

    def __init__(self, config: Config) -> None:
        self._read: dict[Path, Any] = {}
        self._folder, given = config.folder, config.checkpoint
        self._model: tuple[Path, str] | None = None
        self._parts: dict[Part, SavedPart] = {}
        if isinstance(given, Path):
            self._model = given, config.where("checkpoint")
            content = self._content(*self._model)
            for part in _MARKS:
                inside = _inside(content, part)
                if inside:
                    self._parts[part] = SavedPart(inside, f"{config.where('checkpoint')}: the {part} in {given.name}")
        elif isinstance(given, CheckpointFiles):
            if given.model is not None:
                self._model = given.model, config.where("checkpoint.model")
            for part, files in (
                ("optimizer", given.optimizer or ()),
                ("scaler", (given.scaler,) if given.scaler else ()),
                ("scheduler", given.scheduler or ()),
            ):
                if files:
                    self._parts[part] = self._part(part, files, config.where(f"checkpoint.{part}"))

    def load_model(self, model: nn.Module, user: UserCode) -> None:
        """Loads the weights.

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
        """Loads the states of optimizers and schedulers; says of what there is no state, or nothing to put it into.

        Args:
            model: its parameters are the optimizers'.
            training: what to load into.
            grouping: how a config groups parameters, which a training script need not have done.

        Raises:
            WorkloadError: they do not fit.
        """
        optimizer, scheduler = self._parts.get("optimizer"), self._parts.get("scheduler")
        if optimizer is not None:
            load_optimizers(optimizer, training.optimizers, model, grouping)
        known = [one for one in training.schedules if isinstance(one.scheduler, torch.optim.lr_scheduler.LRScheduler)]
        if scheduler is not None and known:
            load_schedules(scheduler, known)
        elif scheduler is not None:
            return (
                f"{scheduler.where} is not used: the config names no scheduler, so the learning rate stays constant",
            )
        elif optimizer is not None and any(one.every for one in known):
            return ("the checkpoint has no state of a learning-rate scheduler: the schedule starts over",)
        return ()

    def scaler(self) -> Mapping[str, Any] | None:
        """The state of the loss scaler as ``GradScaler.load_state_dict`` takes it; None where there is none.

        Raises:
            WorkloadError: it is no such state.
        """
        saved = self._parts.get("scaler")
        return None if saved is None else scaler_state(saved)

    def _content(self, file: Path, where: str) -> Any:
        if file not in self._read:
            self._read[file] = _read(self._folder / file, where)
        return self._read[file]

    def _part(self, part: Part, files: Sequence[Path], where: str) -> SavedPart:
        states: list[Any] = []
        for file in files:
            content = self._content(file, where)
            is_bare = isinstance(content, Mapping) and _MARKS[part] in content
            found = (content,) if is_bare else _inside(content, part)
            if not found:
                keys = f" with the keys {listed(map(_text, content), most=8)}" if isinstance(content, Mapping) else ""
                raise WorkloadError(
                    f"{where}: {file.name} holds no state of {_AN[part]} but a {type(content).__name__}{keys}; "
                    f"allowed: its state_dict(), at the top or under {', '.join(_NESTINGS[part])}"
                )
            states += found
        return SavedPart(tuple(states), f"{where}: {listed(file.name for file in files)}")


_AN: Mapping[Part, str] = {"optimizer": "an optimizer", "scaler": "a loss scaler", "scheduler": "a scheduler"}


def _text(key: object) -> str:
    return repr(key)[:80] if not isinstance(key, str) else key[:80]


def _inside(content: Any, part: Part) -> tuple[Any, ...]:
    """The states of a part in what a training script has saved; empty where there are none, or only empty ones."""
    saved = content if isinstance(content, Mapping) else {}
    for key in _NESTINGS[part]:
        value = saved.get(key)
        states = (value,) if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
        if any(isinstance(state, Mapping) and any(_has_any(inner) for inner in state.values()) for state in states):
            return tuple(states)
    return ()


def _has_any(value: Any) -> bool:
    return not isinstance(value, (Mapping, list, tuple)) or len(value) > 0


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
    except Exception as error:  # noqa: BLE001 - unpickling a file that is no pickle raises anything
        reason = first_line(error).rstrip(".")
        raise WorkloadError(
            f"{where}: {path.name} cannot be read; allowed: what torch.save wrote, or a .safetensors file ({reason})"
        ) from None


def _state_dict(content: Any, where: str, path: Path) -> Mapping[str, Any]:
    """The mapping of names to tensors, also where a training script saved more than that."""
    saved = content if isinstance(content, Mapping) else {}
    inner = next((saved[key] for key in _NESTINGS["model"] if isinstance(saved.get(key), Mapping)), saved)
    if any(isinstance(value, torch.Tensor) for value in inner.values()):
        odd = [key for key in inner if not isinstance(key, str)]
        if odd:
            raise WorkloadError(f"{where}: {path.name} holds a tensor under {odd[0]!r:.80}; allowed: names to tensors")
        return dict(inner)
    keys = f" with the keys {listed(map(_text, saved), most=8)}" if saved else ""
    kind = type(content).__name__
    raise WorkloadError(
        f"{where}: {path.name} holds no state dict but a {kind}{keys}; "
        f"allowed: names to tensors, at the top or under {', '.join(_NESTINGS['model'])}"
    )


def _unwrapped(state: Mapping[str, Any]) -> Mapping[str, Any]:
    for wrapper in _WRAPPERS:
        if all(name.startswith(wrapper) for name in state):
            return _unwrapped({name[len(wrapper) :]: value for name, value in state.items()})
    return state


def _load(model: nn.Module, state: Mapping[str, Any]) -> list[str]:
    """Loads what fits, and says what does not; a missing name that shares its tensor with a present one does."""
    own = model.state_dict()
    misshapen = {name: _shapes(state[name], own[name]) for name in own if name in state}
    misshapen = {name: shapes for name, shapes in misshapen.items() if shapes}
    fitting = {name: value for name, value in state.items() if name not in misshapen}
    result = model.load_state_dict(fitting, strict=False)
    loaded = {_memory(own[name]) for name in own if name in fitting}
    missing = [name for name in result.missing_keys if name not in misshapen and _memory(own.get(name)) not in loaded]
    found = (
        ("missing", missing),
        ("not in the model", list(result.unexpected_keys)),
        ("of another shape", [f"{name} ({shapes})" for name, shapes in misshapen.items()]),
    )
    return [f"{len(names)} {problem}: {listed(names, most=4)}" for problem, names in found if names]


def _shapes(given: Any, needed: Any) -> str:
    if not isinstance(given, torch.Tensor) or not isinstance(needed, torch.Tensor) or given.shape == needed.shape:
        return ""
    return f"{list(given.shape)} in the file, {list(needed.shape)} in the model"


def _memory(value: Any) -> object:
    """What two tied tensors have in common; an object of its own for anything that cannot be tied."""
    if not isinstance(value, torch.Tensor) or value.numel() == 0:
        return object()
    return value.data_ptr(), tuple(value.shape), value.stride()


# The states of optimizers, schedulers and the loss scaler: compared with those of a run, and put into them


@dataclass(frozen=True)
class SavedPart:
    """What a checkpoint has of one part: states in order, and where they were given, as a message begins."""

    states: tuple[Any, ...]
    where: str

    def misfit(self, kind: type, problem: str) -> WorkloadError:
        alone = "to load the weights only: checkpoint: {model: FILE}"
        return WorkloadError(f"{self.where} does not fit the {kind.__name__}\n  {problem}\n  {alone}")


_OF_THE_MACHINE = ("foreach", "fused", "capturable", "differentiable")
"""Settings of a group that say how a step is computed, and not what: those of the run hold."""


def load_optimizers(saved: SavedPart, optimizers: Sequence[Optimizer], model: nn.Module, grouping: str) -> None:
    """Puts the states into the optimizers; the settings of their groups, such as the learning rate, come with them.

    Args:
        saved: a state for each optimizer.
        optimizers: those of the run, over parameters of the model.
        model: names the parameters, and says in which order a script has them.
        grouping: how a config groups parameters by itself: a script with one group of all is understood there too.

    Raises:
        WorkloadError: they do not fit.
    """
    if len(saved.states) != len(optimizers):
        counts = f"{len(saved.states)} in the file, {len(optimizers)} in the run"
        raise saved.misfit(type(optimizers[0]), f"another number of optimizers: {counts}")
    by_config = [group["name"] for group in groups_of(model, grouping)]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for optimizer, state in zip(optimizers, saved.states, strict=True):
        is_by_config = by_config == [group["name"] for group in optimizer.param_groups]
        problem = _loaded(state, optimizer, model if is_by_config else None)
        problem = problem or _unlike_states(optimizer, names)
        if problem:
            raise saved.misfit(type(optimizer), problem)


def _loaded(state: Any, optimizer: Optimizer, model: nn.Module | None) -> str:
    """Loads one state, or says why it cannot be; with a model its own groups are those of a config."""
    if not _is_optimizer_state(state):
        return "it is no state_dict() of a torch optimizer"
    groups = state["param_groups"] if model is None else _regrouped(state["param_groups"], optimizer, model)
    problem = _unlike_groups(groups, optimizer, is_by_config=model is not None) or _unlike_settings(groups, optimizer)
    if not problem:
        try:
            optimizer.load_state_dict(_fitted(state, groups, optimizer))
        except Exception as error:  # noqa: BLE001 - what a stranger's file makes it raise
            return first_line(error)
    return problem


def _is_optimizer_state(state: Any) -> bool:
    if not isinstance(state, Mapping) or not isinstance(state.get("state"), Mapping):
        return False
    groups = state.get("param_groups")
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        return False
    ids = [index for group in groups for index in _ids(group)]
    are_ids = all(isinstance(index, (int, str)) for index in (*ids, *state["state"]))
    are_states = all(isinstance(of_parameter, Mapping) for of_parameter in state["state"].values())
    return are_ids and are_states and bool(ids) and len(set(ids)) == len(ids) and set(state["state"]) <= set(ids)


def _ids(group: Mapping[str, Any]) -> Sequence[Any]:
    ids = group.get("params")
    return ids if isinstance(ids, (list, tuple)) else ()


def _regrouped(groups: Sequence[Any], optimizer: Optimizer, model: nn.Module) -> Sequence[Any]:
    """The one group of ``Optimizer(model.parameters())``, with or without frozen parameters, as those of the run."""
    if len(groups) != 1:
        return groups
    every = list(model.parameters())
    ids = _ids(groups[0])
    trained = every if len(ids) == len(every) else [parameter for parameter in every if parameter.requires_grad]
    if len(ids) != len(trained):
        return groups
    by_parameter = {id(parameter): index for parameter, index in zip(trained, ids, strict=True)}
    return [
        {**groups[0], "params": [by_parameter[id(parameter)] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]


def _unlike_groups(groups: Sequence[Any], optimizer: Optimizer, *, is_by_config: bool) -> str:
    given, needed = [len(_ids(group)) for group in groups], [len(group["params"]) for group in optimizer.param_groups]
    made = "; make it as the training script does: optimizer: {target: FILE.py:NAME}, a function of the model"
    counts = f"{_counts(given)} in the file, {_counts(needed)} in the run"
    return f"other parameter groups: {counts}{made if is_by_config else ''}" if given != needed else ""


def _counts(sizes: Sequence[int]) -> str:
    if len(sizes) == 1:
        return f"one of {sizes[0]} parameters"
    return f"{len(sizes)} of {listed(map(str, sizes), most=4)} parameters"


def _unlike_settings(groups: Sequence[Any], optimizer: Optimizer) -> str:
    """Settings that another kind of optimizer does not have; flags come and go with versions of torch."""
    needed = [key for key, value in optimizer.defaults.items() if _is_numeric(value)]
    wrong = [key for key in needed if not all(_is_numeric(group.get(key)) for group in groups)]
    return f"settings that are missing, or no numbers: {listed(wrong, most=6)}" if wrong else ""


def _is_numeric(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return bool(value) and all(map(_is_number, value))
    return _is_number(value)


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _fitted(state: Mapping[str, Any], groups: Sequence[Any], optimizer: Optimizer) -> dict[str, Any]:
    """The state in the layout of the optimizer's own; what only the run's groups have stays as it is."""
    own = optimizer.state_dict()
    kept = [
        {key: value for key, value in group.items() if key not in given or key in ("name", "params", *_OF_THE_MACHINE)}
        for group, given in zip(own["param_groups"], groups, strict=True)
    ]
    index = {
        old: new
        for group, given in zip(own["param_groups"], groups, strict=True)
        for new, old in zip(group["params"], _ids(given), strict=True)
    }
    return {
        **own,
        "state": {index[old]: value for old, value in state["state"].items() if old in index},
        "param_groups": [{**given, **mine} for given, mine in zip(groups, kept, strict=True)],
    }


def _unlike_states(optimizer: Optimizer, names: Mapping[int, str]) -> str:
    """What a torch optimizer would have made otherwise, found by a step of its like on tensors without memory."""
    if not type(optimizer).__module__.startswith("torch.optim"):
        return ""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    twins = {one: nn.Parameter(torch.empty_like(one, device="meta")) for one in parameters}
    groups = [
        {**group, **dict.fromkeys(_OF_THE_MACHINE, False), "params": [twins[one] for one in group["params"]]}
        for group in optimizer.param_groups
    ]
    for twin in twins.values():
        twin.grad = torch.empty_like(twin)
    like: Callable[..., Optimizer] = type(optimizer)
    try:
        other = like(groups)
        other.step()
    except Exception:  # noqa: BLE001 - it looks at numbers, wants sparse gradients, or a closure
        return ""
    unlike: dict[str, list[str]] = {}
    for parameter, twin in twins.items():
        state = optimizer.state.get(parameter)
        wrong = [key for key, made in other.state[twin].items() if not _is_like(state.get(key), made)] if state else []
        if wrong:
            unlike[names.get(id(parameter), "a parameter")] = wrong
    if not unlike:
        return ""
    name, keys = next(iter(unlike.items()))
    more = f"; the same for {len(unlike) - 1} more parameters" if len(unlike) > 1 else ""
    return f"{listed(keys, most=4)} of {name}: missing, or of another shape{more}"


def _is_like(given: Any, made: Any) -> bool:
    if not isinstance(made, torch.Tensor):
        return made is None or _is_numeric(given)
    if made.dim() == 0:
        return _is_number(given)
    return isinstance(given, torch.Tensor) and given.shape == made.shape


def load_schedules(saved: SavedPart, schedules: Sequence[Schedule]) -> None:
    """Puts the states into the schedulers.

    Raises:
        WorkloadError: they do not fit.
    """
    if len(saved.states) != len(schedules):
        counts = f"{len(saved.states)} in the file, {len(schedules)} in the run"
        raise saved.misfit(type(schedules[0].scheduler), f"another number of schedulers: {counts}")
    for schedule, state in zip(schedules, saved.states, strict=True):
        own = schedule.scheduler.state_dict()
        given = state if isinstance(state, Mapping) else {}
        wrong = [key for key, value in own.items() if _is_numeric(value) and not _is_numeric(given.get(key))]
        missing = [key for key in wrong if not key.startswith("_")]  # those come and go with versions of torch
        problem = f"missing, or no numbers: {listed(missing, most=4)}" if missing else ""
        if not problem:
            fitted = {key: given[key] if key in given and key not in wrong else value for key, value in own.items()}
            try:
                schedule.scheduler.load_state_dict(fitted)
            except Exception as error:  # noqa: BLE001 - what a stranger's file makes it raise
                problem = first_line(error)
        if problem:
            raise saved.misfit(type(schedule.scheduler), problem)


def scaler_state(saved: SavedPart) -> Mapping[str, Any]:
    """The state as ``GradScaler.load_state_dict`` takes it; Apex's too.

    Raises:
        WorkloadError: it is neither.
    """
    given = saved.states[0] if len(saved.states) == 1 and isinstance(saved.states[0], Mapping) else {}
    apex = given.get("loss_scaler0")
    if isinstance(apex, Mapping):
        given = {**_APEX, "scale": apex.get("loss_scale"), "_growth_tracker": apex.get("unskipped")}
    state = {key: float(given[key]) for key in _ALLOWED if _is_number(given.get(key))}
    wrong = [key for key, is_allowed in _ALLOWED.items() if key not in state or not is_allowed(state[key])]
    if wrong:
        raise saved.misfit(torch.amp.GradScaler, f"missing, or not allowed: {listed(wrong, most=5)}")
    return {key: int(value) if key in _WHOLE else value for key, value in state.items()}


_WHOLE = ("growth_interval", "_growth_tracker")

_ALLOWED: Mapping[str, Any] = {
    "scale": lambda value: 0.0 < value < float("inf"),
    "growth_factor": lambda value: 1.0 < value < float("inf"),
    "backoff_factor": lambda value: 0.0 < value < 1.0,
    "growth_interval": lambda value: 1.0 <= value < 2.0**31,
    "_growth_tracker": lambda value: 0.0 <= value < 2.0**31,
}
"""The keys of a GradScaler's state, and what each may be."""

_APEX = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
"""What Apex's dynamic scaler has built in (``apex/amp/scaler.py``)."""
