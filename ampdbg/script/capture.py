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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Interval
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from ampdbg.errors import AmpdbgError, first_line, named_error, reason_of
from ampdbg.files import free_path, replace_file
from ampdbg.ops import CAST_METHODS
from ampdbg.probes.tensors import leaves_of, nbytes
from ampdbg.quantities import byte_size, counted, dotted, shown
from ampdbg.record.file import CAPTURE_SUFFIX, adapter, from_json, of_rank, to_json
from ampdbg.record.findings import Count
from ampdbg.record.run import NOT_CAPTURED, Reach, Record
from ampdbg.replay.investigation import Why
from ampdbg.replay.packing import (
    PackedError,
    Packing,
    Unpacking,
    can_be_written,
    packed_random_state,
    type_name,
    unpacked_random_state,
    written_form,
)
from ampdbg.replay.random_state import RandomState
from ampdbg.replay.snapshot import ModelState, PackedState
from ampdbg.replay.step import Half, Made, Own, RecordedCall, RecordedStep, torch_name
from ampdbg.script.launch import Start
from ampdbg.script.live_step import LiveStep
from ampdbg.script.ranks import has_its_state, why_in_parts

FORMAT, VERSION = "ampdbg.capture", 3


class CaptureError(AmpdbgError):
    """A capture could not be written, read, or put into the script that it is of."""


class UnlikeCallError(PackedError):
    """A call of the same name as the captured one takes its arguments from elsewhere: it is that of another step."""


@dataclass(frozen=True)
class CapturedCall:
    """One call: ``name`` says of what, ``given`` is packed."""

    name: str
    given: Any
    lowers: bool
    has_gradients: bool
    random_state: Count
    training: bool | None = None

    @property
    def first_argument(self) -> Any:
        """Packed; None where it is given none, or this is damaged."""
        try:
            return self.given["list"][0]["tuple"][0]
        except (LookupError, TypeError):
            return None


@dataclass(frozen=True)
class Head:
    """What a capture holds besides tensors. ``record`` is that of the run up to the step, as JSON.

    ``calls`` are those that lead to the losses, in order; ``parts`` has the numbers of those of each part of the step.
    ``reach`` says whether the step is whole, or its modules are here alone. ``weights_grew`` is as of an investigation,
    ``scaler_number`` is that of its scaler in the record, 0 of none, ``optimizer`` the place of that which steps in it.
    ``beside`` has attributes of modules that are not the model's, by the place of the first call of each.
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
    random_states: tuple[Any, ...]
    random_state: Any
    attributes: Mapping[str, Mapping[str, Any]]
    optimizers: tuple[Any, ...]
    record: Mapping[str, Any]
    created: str
    reach: Reach = "whole"
    weights_grew: float = 1.0
    scaler_number: Count = 0
    optimizer: Count = 0
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
        raise CaptureError(f"{path}: cannot be read as a capture: {reason_of(error)}") from None
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

    Raises:
        CaptureError: as :func:`read_head` and :func:`start_in_this_folder`.
    """

    def __init__(self, path: Path, script: Sequence[str] = ()) -> None:
        self.path = path
        self.head = read_head(path)
        self.start = start_in_this_folder(path, script, self.head.start)
        self._opened = safe_open(path, framework="pt")

    @functools.cached_property
    def record(self) -> Record:
        """The record of the run up to the step."""
        return from_json(json.dumps(dict(self.head.record)))

    def put_into(self, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> tuple[str, ...]:
        """Gives the model and its optimizers what the step had; returns notes on what could not be given.

        Raises:
            CaptureError: the model has other parameters.
        """
        names = {name.removeprefix("weight."): name for name in self.keys() if name.startswith("weight.")}
        own = dict(model.named_parameters())
        for name in [*own, *names]:
            now, then = own.get(name), self[names[name]] if name in names else None
            if now is None or then is None or _shape(now) != list(then.shape):
                raise CaptureError(f"{self.path}: the script builds another model now: {_difference(name, now, then)}")
        with torch.no_grad():
            for name, parameter in own.items():
                values = self[names[name]]
                parameter.copy_(torch.view_as_complex(values) if parameter.is_complex() else values)
        return tuple(self._put_into(optimizers))

    def _put_into(self, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[str]:
        if len(optimizers) != len(self.head.optimizers):
            yield (
                f"the script has {len(optimizers)} optimizers now, and had {len(self.head.optimizers)}: their "
                "states were not restored"
            )
            return
        for optimizer, packed in zip(optimizers, self.head.optimizers, strict=True):
            if packed is None:
                yield f"the state of {type(optimizer).__name__} was not restored: it was sharded over the processes"
                continue
            try:
                optimizer.load_state_dict(Unpacking(self, torch.device("cpu")).of(packed, optimizer.state_dict()))
            except Exception as error:  # noqa: BLE001 - an optimizer of the user's own may raise anything
                yield f"the state of {type(optimizer).__name__} was not restored: {first_line(error)}"

    def keys(self) -> list[str]:
        """The names of its tensors."""
        return list(self._opened.keys())

    def __getitem__(self, name: str) -> torch.Tensor:
        try:
            found: torch.Tensor = self._opened.get_tensor(name)
            return found
        except SafetensorError as error:
            raise CaptureError(f"{self.path}: a damaged capture: {first_line(error)}") from None

    def state(self, model: torch.nn.Module) -> ModelState:
        """The model's buffers and attributes from before the step."""
        return self._state("buffer.", self.head.attributes, model)

    def _state(self, prefix: str, packed: Mapping[str, Mapping[str, Any]], model: torch.nn.Module) -> ModelState:
        own = [name for name in self.keys() if name.startswith(prefix)]
        buffers = {name.removeprefix(prefix): self[name] for name in own}
        return PackedState(buffers, packed, self).unpacked(model)

    def random_state(self, device: torch.device) -> RandomState:
        """That of the process when the step had gone backward."""
        return unpacked_random_state(self.head.random_state, Unpacking(self, device))

    def why_unlike(self, live: RecordedStep, device: torch.device) -> Difference | None:
        """Why a step of calls of the same names is another one; None where it is not."""
        try:
            self.step(live, device)
        except CaptureError as error:
            is_other = isinstance(error.__cause__, UnlikeCallError)
            return Difference(len(live.calls), first_line(error).removeprefix(f"{self.path}: ")) if is_other else None
        return None

    def step(self, live: RecordedStep, device: torch.device) -> RecordedStep:
        """The captured step, made of a step of the same calls.

        Raises:
            CaptureError: it was given what is not written, and the other step has nothing like it.
        """
        match = Match(self.head, live)
        unpacking = _GivenAgain(self, match, device)
        calls, given = dict(live.calls), {}
        states = [unpacked_random_state(packed, unpacking) for packed in self.head.random_states]
        # Where the script calls anything under autocast it has a say in what that lowers: a patch switches it off.
        is_off = not any(live.calls[number].lowers for number in match.own)
        for number, place in match.own.items():
            call, captured = live.calls[number], self.head.calls[place]
            calls[number] = replace(
                call,
                lowers=captured.lowers and (call.lowers or is_off),
                has_gradients=captured.has_gradients,
                random_state=states[captured.random_state],
                training=captured.training,
            )
            before = match.given[number]
            try:
                given[number] = _with_dtypes(tuple(unpacking.of(captured.given, list(before))), before)
            except PackedError as error:
                raise CaptureError(f"{self.path}: call {place + 1}, of {captured.name}: {error}") from error
        for number, value in unpacking.casts.items():
            (_, *others), kwargs = match.given[number]
            given[number] = (value, *others), kwargs
        parts = tuple({n: given.get(n, before) for n, before in part.items()} for part in live.given)
        modules = {place: live.calls[n].module for n, place in match.own.items() if place in self.head.beside}
        beside = tuple(
            self._state(f"beside.{place}.", self.head.beside[place], module)
            for place, module in modules.items()
            if module is not None
        )
        return replace(live, calls=calls, given=parts, beside=beside)


def _with_dtypes(given: tuple[Any, Any], now: tuple[Any, Any]) -> tuple[Any, Any]:
    """What a call was given, with the dtypes that the script asks for now, or no more: ``sum(dtype=x.dtype)``."""
    args, kwargs = given
    others = {name: value for name, value in kwargs.items() if not isinstance(value, torch.dtype)}
    dtypes = {name: value for name, value in now[1].items() if isinstance(value, torch.dtype)}
    return args, {**others, **dtypes}


def start_in_this_folder(path: Path, script: Sequence[str], known: Start) -> Start:
    """How the script of a capture or a record is started again, by the command line ``script`` where it has one.

    Raises:
        CaptureError: it does not stand in this folder. The file may come from anybody, and what it starts is code.
    """
    if script:
        is_module = script[0] == "-m" and len(script) > 1
        name, *arguments = script[1:] if is_module else script
        return replace(known, name=name, arguments=tuple(arguments), is_module=is_module)
    if not _is_here(known):
        raise CaptureError(
            f"{path}: captured from {known.typed}, which is not in this folder; go to the folder of the script, "
            f"or name the script: --script {shlex.quote(known.typed)}"
        )
    return known


def _is_here(start: Start) -> bool:
    """The script, or the outermost package of the module, stands in this folder or below it."""
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
    return f"{name} has the shape {list(now.shape)}, and had {list(then.shape)}"


# The calls of a captured step, and which of them a step makes again that comes of the same script


def order_of(recorded: RecordedStep) -> dict[int, int]:
    """The numbers of the calls that the step needs, each with its place among them."""
    return {
        number: place for place, number in enumerate(sorted({number for part in recorded.given for number in part}))
    }


def paths_in(model: torch.nn.Module) -> dict[int, str]:
    """The paths of the model's modules by ``id``."""
    return {id(module): name or "the model" for name, module in model.named_modules()}


def name_of(call: RecordedCall, paths: Mapping[int, str]) -> str:
    """Of what a call is: a module of the model by its path, another by its class, a function as torch calls it."""
    function = call.called
    if isinstance(function, torch.nn.Module):
        return paths.get(id(function), f"{type(function).__module__}.{type(function).__qualname__}")
    return torch_name(function) or str(getattr(function, "__qualname__", type(function).__qualname__))


MADE = "made"
"""The key of what stands for the result of a call: its place among the captured ones."""

OWN = {"live": type_name(Own)}
"""What stands for a tensor of the model's own."""


def place_of(packed: Any) -> int:
    """The place of the call whose result that stands for; -1 of anything else."""
    place = packed.get(MADE) if isinstance(packed, dict) else None
    return place if isinstance(place, int) else -1


class _GivenPacking(Packing):
    """Packs what calls are given; ``places`` has those of the calls by number."""

    def __init__(self, prefix: str, places: Mapping[int, int]) -> None:
        super().__init__(prefix)
        self.places = places

    def of(self, value: Any) -> Any:
        return {MADE: self.places[value.call]} if isinstance(value, Made) else super().of(value)


@dataclass(frozen=True)
class Difference:
    """Why a step is not of the captured calls, and how many of its first ones are."""

    alike: int
    reason: str


class Match:
    """Which call of a step, of the script that was started again, is which of the captured ones.

    No cast counts on either side, and a call takes what lies behind the casts of what it is given: where the script has
    a patch, that puts casts in and leaves others out.

    Args:
        head: of the captured step.
        recorded: the step.
    """

    def __init__(self, head: Head, recorded: RecordedStep) -> None:
        self._captured, self._parts, self._recorded = head.calls, head.parts, recorded
        self._casts = {n for n in order_of(recorded) if _is_cast(name_of(recorded.calls[n], {}))}
        self._left_out = {place for place, call in enumerate(head.calls) if _is_cast(call.name)}
        numbers = [number for number in order_of(recorded) if number not in self._casts]
        places = [place for place in range(len(head.calls)) if place not in self._left_out]
        self.own = dict(zip(numbers, places, strict=False))
        """The number of each call that the step needs and that is no cast, with its place among the captured ones."""
        self._is_as_long = len(numbers) == len(places)
        self.given = {number: given for part in recorded.given for number, given in part.items()}
        """What the calls of the step are given."""

    def why_not(self, model: torch.nn.Module) -> Difference | None:
        """Why the step is not of the same calls; None where it is."""
        paths = paths_in(model)
        for number, place in self.own.items():
            now, then = name_of(self._recorded.calls[number], paths), self._captured[place].name
            if now != then:
                return Difference(place, f"call {place + 1} is a call of {now}, and was one of {then}")
        reason = self._unlike_as_a_whole()
        return Difference(len(self.own), reason) if reason else None

    def source(self, value: Any) -> tuple[Any, int | None]:
        """What lies behind the casts of what a call of the step is given, and the first of these casts, if any."""
        cast = None
        while isinstance(value, Made) and value.call in self._casts:
            cast = value.call
            value = next(iter(self.given[cast][0]), None)
        return value, cast

    def captured_source(self, packed: Any) -> Any:
        """The same of what a captured call was given."""
        place = len(self._captured)
        while place_of(packed) in self._left_out and place_of(packed) < place:  # else it is damaged
            place = place_of(packed)
            packed = self._captured[place].first_argument
        return packed

    def _unlike_as_a_whole(self) -> str:
        """What is other about the step where each of its calls is as captured."""
        if not self._is_as_long:
            return f"it makes {len(order_of(self._recorded))} calls, and the captured one {len(self._captured)}"
        parts = [[self.own[number] for number in sorted(part) if number in self.own] for part in self._recorded.given]
        if parts != [[place for place in part if place not in self._left_out] for part in self._parts]:
            return "its calls lead to other losses"
        return ""


CASTING = CAST_METHODS | {"to", "type", "type_as"}
"""A tensor's methods that only cast it."""


def _is_cast(name: str) -> bool:
    """Torch's function of this name gives the values of its first argument in another format, or in its own."""
    return name.startswith("torch.Tensor.") and name.rpartition(".")[2] in CASTING


class _GivenAgain(Unpacking):
    """Makes what the calls of a captured step were given for those of a step of the same calls.

    ``casts`` has what those casts of the step are given that take data: the captured values.
    """

    def __init__(self, capture: Capture, match: Match, device: torch.device) -> None:
        super().__init__(capture, device)
        self.casts: dict[int, torch.Tensor] = {}
        self._match = match

    def of(self, packed: Any, live: Any = None) -> Any:
        """The value; what an earlier call gave is what that of the step gives.

        Raises:
            PackedError: as of any; or what others gave stands in the place of data.
        """
        now, cast = self._match.source(live)
        then = self._match.captured_source(packed)
        place = self._match.own.get(now.call, -1) if isinstance(now, Made) else -1
        if place != place_of(then):
            raise UnlikeCallError("a result of another call takes the place of data")
        if place >= 0:
            return live
        if then == OWN and not isinstance(now, Own):
            raise UnlikeCallError("data takes the place of a tensor of the model's own")
        value = super().of(then, now)
        if cast is None:
            return value
        self.casts[cast] = value
        return live


# Writing

LARGEST_HEADER = 100_000_000
"""Bytes: safetensors reads no larger one."""


class Captures:
    """Where the captures of a run go, and those that were written.

    Args:
        folder: is made with the first.
        start: how the script was started.
        most: there are never more.
        largest: the bytes that each may have.
        wanted: the step of this number is one, whatever it does; 0 for none.
    """

    def __init__(self, folder: Path, start: Start, *, most: int, largest: int, wanted: int = 0) -> None:
        self._paths: dict[int, Path] = {}
        self.why_not = ""
        """Why one was not written."""
        self.is_wanted = False
        """The next whole step is to be captured, whatever it does."""
        self.start = start
        self._folder = Path(os.path.abspath(folder))
        self._most = most
        self._largest = largest
        self.wanted = wanted
        """The number of the step that was asked for from outside; 0 for none."""
        self._failed = -1

    @property
    def written(self) -> list[Path]:
        """Those that are there, in the order in which they were written."""
        return list(self._paths.values())

    @property
    def are_wanted(self) -> bool:
        """Any may be written; who allows none need not be told that one was not."""
        return self._most > 0

    def has(self, step: int) -> bool:
        """The step of this number was captured."""
        return step in self._paths

    def drop(self, step: int) -> None:
        """Removes the capture of the step of this number, if there is one."""
        if step in self._paths:
            with contextlib.suppress(OSError):
                self._paths.pop(step).unlink()

    def ask(self) -> None:
        """The next whole step is to be captured."""
        self.is_wanted = True

    def begins(self, step: int) -> None:
        """To be called when the step of this number is about to begin."""
        self.is_wanted |= step == self.wanted > 0

    def cannot(self, step: int, why: str) -> None:
        """Notes that a step could not be captured."""
        if step == self.wanted or not self.why_not:
            self.why_not, self._failed = f"step {step} {NOT_CAPTURED}: {why}", step

    def add(self, live: LiveStep) -> None:
        """Writes a step; where that cannot be, ``why_not`` says why, and the script goes on."""
        try:
            self._write(Captured(live, self.start), live.number)
        except CaptureError as error:
            self.cannot(live.number, str(error))
        except OSError as error:
            self.cannot(live.number, f"cannot be written: {reason_of(error)}: {self._folder}")
        except Exception as error:  # noqa: BLE001 - whatever the user's own classes raise
            self.cannot(live.number, f"cannot be written: {named_error(error)}")

    def _write(self, captured: Captured, step: int) -> None:
        if len(self._paths) >= self._most and not self.has(step):
            raise CaptureError(f"at most {counted(self._most, 'capture')} a run; allow more with --max-captures")
        content = captured.content(self._largest)
        begin, end = f"{datetime.now(timezone.utc):%Y%m%dT%H%M%SZ}", of_rank(f"step-{step}", self.start.rank)
        # A name of its own, also beside a run that captures in the same second.
        path = free_path(self._folder, begin, f"-{end}{CAPTURE_SUFFIX}")
        with contextlib.ExitStack() as stack:
            stack.callback(path.unlink, missing_ok=True)
            replace_file(path, content)
            stack.pop_all()
        self.drop(step)  # of another turn
        self._paths[step] = path
        self.why_not = "" if self._failed == step else self.why_not


_asked: list[Callable[[], None]] = []


@contextlib.contextmanager
def asked_from_code(ask: Callable[[], None]) -> Iterator[None]:
    """While this is entered :func:`ask_for_capture` calls ``ask``."""
    _asked.append(ask)
    try:
        yield
    finally:
        _asked.remove(ask)


def ask_for_capture() -> bool:
    """Asks for a capture of the next whole step; False where nothing captures."""
    for ask in _asked:
        ask()
    return bool(_asked)


@dataclass(frozen=True)
class Captured:
    """A step at hand, right before its optimizer would step, and all that is to be known of it elsewhere."""

    live: LiveStep
    start: Start

    @property
    def size(self) -> int:
        """About how many bytes a file of it takes."""
        parts = (
            list(self.live.model.parameters()),
            dict(self.live.state.buffers),
            self._states,
            self.live.recorded.given,
        )
        tensors = {id(tensor): tensor for part in parts for _, tensor in leaves_of(part)}
        return sum(map(nbytes, tensors.values()))

    @functools.cached_property
    def _states(self) -> Sequence[Any]:
        """Those of the optimizers; None for one that might wait for other processes to give it."""
        is_alone = self.start.processes == 1
        return [one.state_dict() if is_alone or has_its_state(one) else None for one in self.live.watcher.optimizers]

    def content(self, largest: int) -> bytes:
        """The bytes of its file.

        Raises:
            CaptureError: these are more than ``largest``, or parts of the model are in other processes.
        """
        if self.start.processes > 1 and (why := why_in_parts(self.live.model)):
            raise CaptureError(why)
        if self.size > largest:
            told = f"it would take {byte_size(self.size)}, and at most {byte_size(largest)} are allowed"
            raise CaptureError(f"{told}; allow more with --max-capture-size")
        recorded = self.live.recorded
        packing = _GivenPacking("value", order_of(recorded))
        own = self.live.state.packed()
        first = {id(recorded.calls[number].module): place for number, place in reversed([*packing.places.items()])}
        found = {first[id(state.model)]: state for state in recorded.beside}
        beside = {place: state.packed(f"attribute.{place}") for place, state in found.items()}
        head = self._head(packing, own.attributes, {place: one.attributes for place, one in beside.items()})
        weights = self.live.model.named_parameters()
        tensors = {f"weight.{name}": written_form(self.live.state.before(one)) for name, one in weights}
        for prefix, state in (("buffer", own), *((f"beside.{place}", one) for place, one in beside.items())):
            buffers = state.buffers.items()
            tensors |= {f"{prefix}.{name}": written_form(one) for name, one in buffers if can_be_written(one)}
            tensors |= state.tensors
        text = json.dumps({**asdict(head), "loss": str(head.loss)}, allow_nan=False, ensure_ascii=True)
        if len(text) > LARGEST_HEADER:
            raise CaptureError(f"its description takes {byte_size(len(text))}")
        return save({**tensors, **packing.tensors}, metadata={FORMAT: text})

    def _head(
        self,
        packing: _GivenPacking,
        attributes: Mapping[str, Mapping[str, Any]],
        beside: Mapping[int, Mapping[str, Mapping[str, Any]]],
    ) -> Head:
        recorded, paths, numbers = self.live.recorded, paths_in(self.live.model), packing.places
        given = {number: given for part in recorded.given for number, given in part.items()}
        calls, states = list[CapturedCall](), list[RandomState]()
        for number in numbers:
            call = recorded.calls[number]
            if not states or call.random_state.others(states[-1]):  # between two draws all calls have one state
                states.append(call.random_state)
            what, of = packing.of(list(given[number])), len(states) - 1
            calls.append(CapturedCall(name_of(call, paths), what, call.lowers, call.has_gradients, of, call.training))
        return Head(
            step=self.live.number,
            scale=self.live.scale,
            loss=self.live.loss,
            why=self.live.why,
            half=self.live.half,
            reach=recorded.reach,
            weights_grew=self.live.watcher.optimizers.weights_grew,
            optimizer=self.live.optimizer,
            scaler_number=self.live.scaler_number,
            device=str(next(self.live.model.parameters()).device),
            start=self.start,
            calls=tuple(calls),
            parts=tuple(tuple(numbers[number] for number in sorted(part)) for part in recorded.given),
            random_states=tuple(packed_random_state(state, packing) for state in states),
            random_state=packed_random_state(RandomState.now(), packing),
            attributes=attributes,
            beside=beside,
            optimizers=tuple(map(packing.of, self._states)),
            record=json.loads(to_json(self.live.watcher.record())),
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )
