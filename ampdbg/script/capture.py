"""Captures: a failing step of a script in one file, to be run again anywhere, long after its process has ended.

A capture is a safetensors file. Its tensors are the weights, the buffers, the optimizers' states, what the step's calls
were given and the random states; its header has the rest as JSON (:class:`Head`). Nothing in it is pickled, and to read
one runs no code: the calls themselves are made again by the script, which is started anew for it.
"""

from __future__ import annotations

import functools
import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from annotated_types import Interval
from safetensors import SafetensorError, safe_open

from ampdbg.errors import AmpdbgError, first_line
from ampdbg.quantities import dotted, shown
from ampdbg.record.file import adapter, from_json
from ampdbg.record.findings import Count
from ampdbg.record.run import Record
from ampdbg.replay.copies import Copying
from ampdbg.replay.investigation import Why
from ampdbg.replay.narrowings import NARROWS_OR_MOVES
from ampdbg.replay.packing import PackedError, Unpacking, unpacked_random_state
from ampdbg.replay.pass_end import module_of
from ampdbg.replay.played_step import Made, PlayedStep
from ampdbg.replay.random_state import RandomState
from ampdbg.replay.snapshot import ModelState
from ampdbg.script.captured_calls import CapturedCall, Match, data_calls, first_given
from ampdbg.script.played_run import Half

if TYPE_CHECKING:
    pass

FORMAT, VERSION = "ampdbg.capture", 1

IN_A_GROUP = "WORLD_SIZE"
"""The environment has this where a launcher, or the user, tells a script to train in a group, of one process too."""


class CaptureError(AmpdbgError):
    """A capture could not be written, read, or put into the script that it is of."""


@dataclass(frozen=True)
class Start:
    """How the script was started: from which folder, with a GPU that was emulated or not, as one of how many."""

    name: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    folder: str = ""
    emulate: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    rank: Count = 0
    processes: Count = 1

    @property
    def is_of_group(self) -> bool:
        """Whether it trained in a group of processes, be it of one."""
        return self.processes > 1 or IN_A_GROUP in self.environment


@dataclass(frozen=True)
class Head:
    """What a capture holds besides tensors. ``record`` is that of the run up to the step, as JSON.

    ``calls`` are those that lead to the losses, in order; ``parts`` has the numbers of those of each part of the step,
    and ``losses`` where its losses are: the number of a call, and the path in what that gave. ``is_broken_off`` says
    that the script has ended in the step: only its forward pass is here. ``weights_grew`` is as of an investigation,
    ``scaler_number`` is that of its scaler in the record, 0 where that is not known; ``computed`` names what looks like
    data, and the step itself may have computed, and ``replaced`` what of that has
    finite numbers here, and had none. ``beside`` has attributes of modules that are not the model's, by the place of
    the first call of each.
    """

    step: Count
    scale: Annotated[float, Interval(gt=0, le=2.0**127)]
    loss: float
    why: Why
    half: Half | None
    device: str
    start: Start
    calls: tuple[CapturedCall, ...]
    parts: tuple[tuple[Count, ...], ...]
    losses: tuple[tuple[tuple[Count, str], ...], ...]
    random_states: tuple[Any, ...]
    random_state: Any
    attributes: Mapping[str, Mapping[str, Any]]
    optimizers: tuple[Any, ...]
    scaler: Any
    record: Mapping[str, Any]
    created: str
    is_broken_off: bool = False
    weights_grew: float = 1.0
    scaler_number: Count = 0
    computed: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    beside: Mapping[Count, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    format: str = FORMAT
    version: int = VERSION


def read_head(path: Path) -> Head:
    """What a capture holds besides tensors; no code of it runs.

    Raises:
        CaptureError: it is missing, damaged, of another version, or no capture; the message names the file.
    """
    from pydantic import ValidationError
    from pydantic_core import from_json as parsed

    try:
        with safe_open(path, framework="pt") as opened:
            text = (opened.metadata() or {}).get(FORMAT)
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
        raise CaptureError(f"{path}: cannot be read as a capture: {reason}") from None
    if text is None:
        raise CaptureError(f"{path}: no capture: its header has no {FORMAT}; ampdbg run writes captures")
    try:
        data = parsed(text, allow_inf_nan=False)
        if not isinstance(data, dict) or data.get("version") != VERSION:
            version = shown(data.get("version") if isinstance(data, dict) else data)
            raise CaptureError(f"{path}: a capture of version {version}; this ampdbg reads version {VERSION}")
        head: Head = adapter(Head).validate_python(data)
        from_json(json.dumps(dict(head.record)))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        raise CaptureError(f"{path}: a damaged capture: {dotted(first['loc'])}: {first['msg']}") from None
    except CaptureError:
        raise
    except (ValueError, RecursionError, AmpdbgError) as error:
        raise CaptureError(f"{path}: a damaged capture: {first_line(error)}") from None
    return head


class Capture:
    """A capture that was read, to be put into a script that has been started again.

    Args:
        path: the file.
        script: a command line that is started in the place of the captured one, with its options.
        is_patched: its code has a patch, which may cast what calls are given and run them outside of autocast.

    Raises:
        CaptureError: as :func:`read_head`; or it is to start what does not stand in this folder. A capture may come
            from anybody, and what it starts is code.
    """

    def __init__(self, path: Path, script: Sequence[str] = (), *, is_patched: bool = False) -> None:
        self.path = path
        self._is_patched = is_patched
        self.head = read_head(path)
        self.start = _start_of(script) if script else self.head.start
        if not script and not _is_here(self.start):
            typed = shlex.join([*(["-m"] if self.start.is_module else []), self.start.name, *self.start.arguments])
            raise CaptureError(
                f"{path}: it is of {typed}, which does not stand in this folder; go to the folder of the script, or "
                f"say what to start: --script {shlex.quote(typed)}"
            )
        self._opened = safe_open(path, framework="pt")

    @functools.cached_property
    def record(self) -> Record:
        """The record of the run up to the step."""
        return from_json(json.dumps(dict(self.head.record)))

    @property
    def own_calls(self) -> frozenset[str]:
        """Names of what the script computes of its own data, beside what its models make: where a patch has made FP32
        of that, it is a part of the step all the same. Moves and casts are so by their format alone."""
        names = (self.head.calls[place].name for place in data_calls(self.head.calls) if self._is_patched)
        return frozenset(name for name in names if name.rpartition(".")[2] not in NARROWS_OR_MOVES)

    def match(self, played: PlayedStep) -> Match:
        """Which call of a step of the script that was started again is which of the captured ones."""
        return Match(self.head.calls, self.head.parts, played, is_patched=self._is_patched)

    def put_into(self, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> tuple[str, ...]:
        """Gives the model and its optimizers what the step had; returns notes on what could not be given.

        Raises:
            CaptureError: the model has other parameters.
        """
        names = {name.removeprefix("weight."): name for name in self._names() if name.startswith("weight.")}
        own = dict(model.named_parameters())
        for name in [*own, *names]:
            now, then = own.get(name), self._tensor(names[name]) if name in names else None
            if now is None or then is None or _shape(now) != list(then.shape):
                raise CaptureError(f"{self.path}: the script makes another model now: {_difference(name, now, then)}")
        with torch.no_grad():
            for name, parameter in own.items():
                values = self._tensor(names[name])
                parameter.copy_(torch.view_as_complex(values) if parameter.is_complex() else values)
        return tuple(self._put_into(optimizers))

    def _put_into(self, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[str]:
        if len(optimizers) != len(self.head.optimizers):
            yield f"there are {len(optimizers)} optimizers now, and were {len(self.head.optimizers)}: theirs is as now"
            return
        for optimizer, packed in zip(optimizers, self.head.optimizers, strict=True):
            if packed is None:
                yield f"the state of {type(optimizer).__name__} is as now: it was shared out among the processes"
                continue
            try:
                optimizer.load_state_dict(self.unpacking(torch.device("cpu")).of(packed, optimizer.state_dict()))
            except Exception as error:  # noqa: BLE001 - an optimizer of the user's own may raise anything
                yield f"the state of {type(optimizer).__name__} is not the captured one: {first_line(error)}"

    def unpacking(self, device: torch.device) -> Unpacking:
        """What makes values of those that were packed; ``device`` is for tensors that were not on the CPU."""
        return Unpacking(self, device)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensor(name)

    def _names(self) -> list[str]:
        return list(self._opened.keys())

    def _tensor(self, name: str) -> torch.Tensor:
        try:
            found: torch.Tensor = self._opened.get_tensor(name)
            return found
        except SafetensorError as error:
            raise CaptureError(f"{self.path}: a damaged capture: {first_line(error)}") from None

    def state(self, device: torch.device) -> ModelState:
        """The model's buffers and attributes from before the step."""
        return self._state("buffer.", self.head.attributes, device)

    def _state(self, prefix: str, packed: Mapping[str, Mapping[str, Any]], device: torch.device) -> ModelState:
        unpacking, own = self.unpacking(device), [name for name in self._names() if name.startswith(prefix)]
        attributes = {
            module: {key: unpacking.of(value) for key, value in held.items()} for module, held in packed.items()
        }
        return ModelState({name.removeprefix(prefix): self._tensor(name) for name in own}, attributes)

    def random_state(self, device: torch.device) -> RandomState:
        """That of the process when the step had gone backward."""
        return unpacked_random_state(self.head.random_state, self.unpacking(device))

    def played(self, live: PlayedStep, device: torch.device) -> PlayedStep:
        """The captured step, made of a step of the same calls.

        Raises:
            PackedError: it was given what is not written, and the other step has nothing like it.
        """
        unpacking, match = self.unpacking(device), self.match(live)
        calls, given = list(live.calls), {}
        states = [unpacked_random_state(packed, unpacking) for packed in self.head.random_states]
        for number, place in match.own.items():
            call, captured = live.calls[number], self.head.calls[place]
            state = states[captured.random_state]
            lowers = captured.lowers and (call.lowers or not self._is_patched)
            calls[number] = replace(call, lowers=lowers, has_gradients=captured.has_gradients, random_state=state)
            before = next(part[number] for part in live.given if number in part)
            try:
                own = unpacking.with_own(_first_of(match.cast_before(place), unpacking))
                given[number] = tuple(own.of(captured.given, list(before)))
                if self._is_patched:
                    given[number] = _with_dtypes(given[number], before)
            except PackedError as error:
                raise CaptureError(f"{self.path}: call {place + 1}, of {captured.name}: {error}") from None
            if any(made.call in match.spare for made in _made_in(given[number])):
                raise CaptureError(f"{self.path}: call {place + 1}, of {captured.name}, takes what other calls gave")
        parts = [{n: given.get(n, before) for n, before in part.items() if n not in match.spare} for part in live.given]
        calls_at = {place: live.calls[number] for number, place in match.own.items()}
        modules = {place: module_of(calls_at[place]) for place in self.head.beside if place in calls_at}
        beside = tuple(
            (module, self._state(f"beside.{place}.", self.head.beside[place], device))
            for place, module in modules.items()
            if module is not None
        )
        losses = {min(now): live.losses[min(part)] for now, part in zip(parts, live.given, strict=True)}
        return replace(live, calls=calls, given=tuple(parts), losses=losses, beside=beside, replaced=self.head.replaced)


def _made_in(given: Any) -> list[Made]:
    found: list[Made] = []
    Copying(lambda value: found.append(value) if isinstance(value, Made) else value).of(given)
    return found


def _first_of(cast: CapturedCall | None, unpacking: Unpacking) -> torch.Tensor | None:
    """What a cast was given."""
    first = unpacking.of(first_given(cast)) if cast is not None else None
    return first if isinstance(first, torch.Tensor) else None


def _with_dtypes(given: tuple[Any, Any], patched: tuple[Any, Any]) -> tuple[Any, Any]:
    """What a call was given, with the dtypes that a patch asks for, or asks for no more: ``sum(dtype=x.dtype)``."""
    args, kwargs = given
    others = {name: value for name, value in kwargs.items() if not isinstance(value, torch.dtype)}
    dtypes = {name: value for name, value in patched[1].items() if isinstance(value, torch.dtype)}
    return args, {**others, **dtypes}


def _start_of(script: Sequence[str]) -> Start:
    is_module = script[0] == "-m" and len(script) > 1
    name, *arguments = script[1:] if is_module else script
    return Start(name, tuple(arguments), is_module)


def _is_here(start: Start) -> bool:
    """Whether the script, or the outermost package of the module, stands in this folder or below it."""
    here = os.path.realpath(os.getcwd())
    if start.is_module:
        first = os.path.join(here, start.name.partition(".")[0])
        return os.path.isdir(first) or os.path.isfile(f"{first}.py")
    script = os.path.realpath(start.name)
    return os.path.exists(script) and os.path.commonpath([here, script]) == here


def _shape(parameter: torch.Tensor) -> list[int]:
    return [*parameter.shape, 2] if parameter.is_complex() else list(parameter.shape)


def _difference(name: str, now: torch.Tensor | None, then: torch.Tensor | None) -> str:
    if now is None or then is None:
        return f"it has {'no ' if now is None else ''}{name}, and had {'none' if then is None else 'it'}"
    return f"{name} is {list(now.shape)}, and was {list(then.shape)}"
