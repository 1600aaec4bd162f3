"""Captures: a failing step of a script in one file, to be run again anywhere, long after its process has ended.

A capture is a safetensors file. Its tensors are the weights, the buffers, the optimizers' states, what the step's calls
were given and the random states; its header has the rest as JSON (:class:`Head`). Nothing in it is pickled, and to read
one runs no code: the calls themselves are made again by the script, which is started anew for it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from annotated_types import Interval
from safetensors import SafetensorError, safe_open

from ampdbg.errors import AmpdbgError, first_line
from ampdbg.quantities import dotted, shown
from ampdbg.record.file import from_json
from ampdbg.record.findings import Count
from ampdbg.record.run import Record
from ampdbg.replay.investigation import Why
from ampdbg.replay.open_pass import PassEnd
from ampdbg.replay.packing import PackedError, Unpacking, unpacked_random_state
from ampdbg.replay.played_step import PlayedStep, TapedCall
from ampdbg.replay.random_state import RandomState
from ampdbg.replay.snapshot import ModelState, SavedTensor
from ampdbg.script.played_run import Half

if TYPE_CHECKING:
    from pydantic import TypeAdapter

FORMAT, VERSION = "ampdbg.capture", 1

CASTS = ("torch.Tensor.to", "torch.Tensor.type", "torch.Tensor.type_as")
"""What casts to the format of another tensor."""

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
class CapturedCall:
    """One call: ``name`` says of what, ``reads`` which earlier ones it takes results from, ``given`` is packed."""

    name: str
    reads: tuple[Count, ...]
    given: Any
    lowers: bool
    has_gradients: bool
    writes: bool
    random_state: Count


@dataclass(frozen=True)
class Head:
    """What a capture holds besides tensors. ``record`` is that of the run up to the step, as JSON.

    ``calls`` are those that lead to the losses, in order; ``parts`` has the numbers of those of each part of the step,
    and ``losses`` where its losses are: the number of a call, and the path in what that gave. ``is_broken_off`` says
    that the script has ended in the step: only its forward pass is here. ``weights_grew`` is as of an investigation,
    and ``computed`` names what looks like data, and the step itself may have computed.
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
    computed: tuple[str, ...] = ()
    format: str = FORMAT
    version: int = VERSION


# The calls of a step


def order_of(played: PlayedStep) -> dict[int, int]:
    """The numbers of the calls that the step needs, each with its place among them."""
    return {number: place for place, number in enumerate(sorted({number for part in played.given for number in part}))}


def paths_in(model: torch.nn.Module) -> dict[int, str]:
    """The paths of the model's modules by ``id``."""
    return {id(module): name or "the model" for name, module in model.named_modules()}


def name_of(call: TapedCall, paths: Mapping[int, str]) -> str:
    """Of what a call is: a module of the model by its path, another by its class, a function as torch calls it."""
    function = call.function.module if isinstance(call.function, PassEnd) else call.function
    if isinstance(function, torch.nn.Module):
        return paths.get(id(function), f"{type(function).__module__}.{type(function).__qualname__}")
    with contextlib.suppress(Exception):  # it is no function of torch's
        if name := torch.overrides.resolve_name(function):
            return str(name)
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def reads_of(call: TapedCall, numbers: Mapping[int, int]) -> tuple[int, ...]:
    """The places of the calls that a call takes results from."""
    return tuple(sorted({numbers[other] for other in call.reads if other in numbers}))


# To read one


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
        head = _adapter().validate_python(data)
        from_json(json.dumps(dict(head.record)))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        raise CaptureError(f"{path}: a damaged capture: {dotted(first['loc'])}: {first['msg']}") from None
    except CaptureError:
        raise
    except (ValueError, RecursionError, AmpdbgError) as error:
        raise CaptureError(f"{path}: a damaged capture: {first_line(error)}") from None
    return head


def _adapter() -> TypeAdapter[Head]:
    from pydantic import TypeAdapter

    return TypeAdapter(Head)


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

    def why_not(self, played: PlayedStep, model: torch.nn.Module) -> str:
        """Why a step of the script that was started again is not of the same calls; "" where it is."""
        paths, (own, casts) = paths_in(model), self._places(played)
        numbers, left = {**own, **casts}, {*range(len(self.head.calls))}.difference(own.values())
        for number, place in own.items():
            if place >= len(self.head.calls):
                break
            call, known = played.calls[number], self.head.calls[place]
            now, then = reads_of(call, numbers), tuple(one for one in known.reads if one not in left)
            if (name_of(call, paths), now) != (known.name, then):
                return f"call {place + 1} is of {name_of(call, paths)}, and was of {known.name}"
        if len(own) + sum(map(self._may_be_left_out, left)) != len(self.head.calls):
            return f"it makes {len(own)} calls, and made {len(self.head.calls)}"
        parts = tuple(tuple(numbers[number] for number in sorted(part) if number in own) for part in played.given)
        if parts != tuple(tuple(place for place in part if place not in left) for part in self.head.parts):
            return "its calls lead to other losses"
        if self._is_patched and own and played.calls[next(iter(own))].lowers != self.head.calls[0].lowers:
            return "autocast is on in one of them, and off in the other"  # a patch begins behind the model
        return ""

    def _places(self, played: PlayedStep) -> tuple[dict[int, int], dict[int, int]]:
        """The numbers of the calls that the step needs, each with its place among the captured ones; and those of the
        casts which a patch has put in, each with the place of what it casts."""
        own, casts, place = dict[int, int](), dict[int, int](), 0
        for number in order_of(played):
            call = played.calls[number]
            if self._is_of_patch(call, place):
                read = max(call.reads)
                casts[number] = own[read] if read in own else casts[read]
            else:
                while self._may_be_left_out(place) and name_of(call, {}) != self.head.calls[place].name:
                    place += 1
                own[number] = place
                place += 1
        return own, casts

    def _may_be_left_out(self, place: int) -> bool:
        """Whether a captured call only casts what the script gave it, such as a target: where a patch has made FP32 of
        what that was cast to the format of, nothing is cast any more."""
        known = self.head.calls[place : place + 1]
        return self._is_patched and any(call.name in CASTS and not call.reads for call in known)

    def _is_of_patch(self, call: TapedCall, place: int) -> bool:
        """Whether it is a cast to FP32, where the captured step has made none."""
        is_cast = self._is_patched and call.function is torch.Tensor.float and bool(call.reads)
        return is_cast and not any(known.name == "torch.Tensor.float" for known in self.head.calls[place : place + 1])

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
        unpacking = self.unpacking(device)
        buffers = {name.removeprefix("buffer."): self._tensor(name) for name in self._names() if name[:7] == "buffer."}
        attributes = {
            module: {key: _saved(unpacking.of(value)) for key, value in held.items()}
            for module, held in self.head.attributes.items()
        }
        return ModelState(buffers, attributes)

    def random_state(self, device: torch.device) -> RandomState:
        """That of the process when the step had gone backward."""
        return unpacked_random_state(self.head.random_state, self.unpacking(device))

    def played(self, live: PlayedStep, device: torch.device) -> PlayedStep:
        """The captured step, made of a step of the same calls.

        Raises:
            PackedError: it was given what is not written, and the other step has nothing like it.
        """
        unpacking = self.unpacking(device)
        numbers, _ = self._places(live)
        calls, given = list(live.calls), {}
        states = [unpacked_random_state(packed, unpacking) for packed in self.head.random_states]
        for number, place in numbers.items():
            call, captured = live.calls[number], self.head.calls[place]
            state = states[captured.random_state]
            lowers = captured.lowers and (call.lowers or not self._is_patched)
            calls[number] = replace(call, lowers=lowers, has_gradients=captured.has_gradients, random_state=state)
            before = next(part[number] for part in live.given if number in part)
            try:
                unpacking.uncast = self._uncast(captured, {*numbers.values()}, unpacking)
                given[number] = tuple(unpacking.of(captured.given, list(before)))
                if self._is_patched:
                    given[number] = _with_dtypes(given[number], before)
            except PackedError as error:
                raise CaptureError(f"{self.path}: call {place + 1}, of {captured.name}: {error}") from None
        parts = tuple({number: given.get(number, part[number]) for number in part} for part in live.given)
        return replace(live, calls=calls, given=parts)

    def _uncast(self, captured: CapturedCall, places: Collection[int], unpacking: Unpacking) -> torch.Tensor | None:
        """What a call is given in the place of what a cast had made of it that a patch has left out."""
        left = [place for place in captured.reads if place not in places]
        if len(left) != 1:
            return None
        args, _ = unpacking.of(self.head.calls[left[0]].given)
        return args[0] if args and isinstance(args[0], torch.Tensor) else None


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


def _saved(value: Any) -> Any:
    return SavedTensor(value, None, True, value.requires_grad) if isinstance(value, torch.Tensor) else value


def _shape(parameter: torch.Tensor) -> list[int]:
    return [*parameter.shape, 2] if parameter.is_complex() else list(parameter.shape)


def _difference(name: str, now: torch.Tensor | None, then: torch.Tensor | None) -> str:
    if now is None or then is None:
        return f"it has {'no ' if now is None else ''}{name}, and had {'none' if then is None else 'it'}"
    return f"{name} is {list(now.shape)}, and was {list(then.shape)}"
