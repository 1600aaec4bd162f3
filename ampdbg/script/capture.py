"""Captures: a failing step of a script in one file, for a replay anywhere, long after its process has ended.

A capture is a safetensors file. Its tensors are the weights, buffers, optimizer states, random states and the inputs
of the step's calls. Its header holds the rest as JSON (:class:`Head`). Nothing is pickled, and reading a capture runs
no code. For a replay, the restarted script makes the calls again.
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
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from ampdbg.errors import AmpdbgError, first_line, named_error, reason_of
from ampdbg.files import free_path, replace_file
from ampdbg.ops import CAST_METHODS
from ampdbg.probes.tensors import nbytes
from ampdbg.quantities import byte_size, counted, dotted, shown
from ampdbg.record.file import CAPTURE_SUFFIX, adapter, from_json, of_rank, to_json
from ampdbg.record.findings import Count
from ampdbg.record.run import NOT_CAPTURED, Record
from ampdbg.replay.investigation import StepFacts
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
from ampdbg.replay.step import Made, Own, RecordedCall, RecordedStep, torch_name
from ampdbg.script.launch import Start
from ampdbg.script.live_step import LiveStep
from ampdbg.script.ranks import has_its_state, why_in_parts
from ampdbg.workload.batches import tensor_leaves

FORMAT, VERSION = "ampdbg.capture", 3


class CaptureError(AmpdbgError):
    """A capture could not be written, read, or loaded into its script."""


class UnlikeCallError(PackedError):
    """A call has the name of the captured call but takes other inputs, so it belongs to another step."""


@dataclass(frozen=True)
class CapturedCall:
    """One call: ``name`` names the called function or module, ``given`` holds its packed arguments."""

    name: str
    given: Any
    lowers: bool
    has_gradients: bool
    random_state: Count
    training: bool | None = None

    @property
    def first_argument(self) -> Any:
        """The packed first argument; None if there is none, or the capture is damaged."""
        try:
            return self.given["list"][0]["tuple"][0]
        except (LookupError, TypeError):
            return None


@dataclass(frozen=True, kw_only=True)
class Head(StepFacts):
    """The content of a capture besides tensors. ``record`` is the run's record up to the step, as JSON.

    ``calls`` are the calls that the losses need, in order. ``parts`` lists the call numbers of each part of the step.
    ``beside`` holds attributes of modules outside the model, by the place of each module's first call.
    """

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
    beside: Mapping[Count, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    format: str = FORMAT
    version: int = VERSION


def read_head(path: Path) -> Head:
    """Return the content of a capture besides tensors, without running code from the file.

    Raises:
        CaptureError: it is missing, damaged, not a capture, or has another version. The message names the file.
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
    """An opened capture, to be loaded into a restarted script.

    Args:
        path: the file.
        script: a command line to start instead of the captured one, with its options.

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
        """Load the step's weights and optimizer states, and return notes on states that could not be restored.

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
        """Return the names of its tensors."""
        return list(self._opened.keys())

    def __getitem__(self, name: str) -> torch.Tensor:
        try:
            found: torch.Tensor = self._opened.get_tensor(name)
            return found
        except SafetensorError as error:
            raise CaptureError(f"{self.path}: a damaged capture: {first_line(error)}") from None

    def state(self, model: torch.nn.Module) -> ModelState:
        """Return the model's buffers and attributes from before the step."""
        return self._state("buffer.", self.head.attributes, model)

    def _state(self, prefix: str, packed: Mapping[str, Mapping[str, Any]], model: torch.nn.Module) -> ModelState:
        own = [name for name in self.keys() if name.startswith(prefix)]
        buffers = {name.removeprefix(prefix): self[name] for name in own}
        return PackedState(buffers, packed, self).unpacked(model)

    def random_state(self, device: torch.device) -> RandomState:
        """Return the random state of the process after the step's backward pass."""
        return unpacked_random_state(self.head.random_state, Unpacking(self, device))

    def why_unlike(self, live: RecordedStep) -> Difference | None:
        """Return why a step with the same call names is a different step, or None if it is not."""
        try:
            self.step(live)
        except CaptureError as error:
            is_other = isinstance(error.__cause__, UnlikeCallError)
            return Difference(len(live.calls), first_line(error).removeprefix(f"{self.path}: ")) if is_other else None
        return None

    def step(self, live: RecordedStep) -> RecordedStep:
        """Return the captured step, built from a live step with the same calls.

        Raises:
            CaptureError: a call's argument was not captured, and the live step has no counterpart.
        """
        match = Match(self.head, live)
        unpacking, device_type = _GivenAgain(self, match, live.device), live.device.type
        calls, given = dict(live.calls), {}
        states = [unpacked_random_state(packed, unpacking) for packed in self.head.random_states]
        # If the script uses autocast at all, it decides which calls run under it: a patch may have disabled it.
        is_off = not any(device_type in live.calls[number].lowers for number in match.own)
        lowered = {device_type: torch.float16}  # of any dtype: the run has its own
        for number, place in match.own.items():
            call, captured = live.calls[number], self.head.calls[place]
            calls[number] = replace(
                call,
                lowers=lowered if captured.lowers and (is_off or device_type in call.lowers) else {},
                has_gradients=captured.has_gradients,
                random_state=states[captured.random_state],
                training=captured.training,
            )
            before = live.arguments[number]
            try:
                given[number] = _with_dtypes(tuple(unpacking.of(captured.given, list(before))), before)
            except PackedError as error:
                raise CaptureError(f"{self.path}: call {place + 1}, of {captured.name}: {error}") from error
        for number, value in unpacking.casts.items():
            (_, *others), kwargs = live.arguments[number]
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
    """Replace a captured call's dtype keywords with those that the script passes now, as in ``sum(dtype=x.dtype)``."""
    args, kwargs = given
    others = {name: value for name, value in kwargs.items() if not isinstance(value, torch.dtype)}
    dtypes = {name: value for name, value in now[1].items() if isinstance(value, torch.dtype)}
    return args, {**others, **dtypes}


def start_in_this_folder(path: Path, script: Sequence[str], known: Start) -> Start:
    """Return how to restart the script of a capture or record, with the command line ``script`` if it is given.

    Raises:
        CaptureError: the script is not in this folder. The file may come from anyone, and restarting runs code.
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
    """True if the script, or the outermost package of the module, is in this folder or below it."""
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


# The calls of a captured step, and the matching calls in a step of the same script


def paths_in(model: torch.nn.Module) -> dict[int, str]:
    """Map the ``id`` of each module of the model to its path."""
    return {id(module): name or "the model" for name, module in model.named_modules()}


def name_of(call: RecordedCall, paths: Mapping[int, str]) -> str:
    """Name the called object: a model's module by its path, another module by its class, a function by torch's name."""
    function = call.called
    if isinstance(function, torch.nn.Module):
        return paths.get(id(function), f"{type(function).__module__}.{type(function).__qualname__}")
    return torch_name(function) or str(getattr(function, "__qualname__", type(function).__qualname__))


MADE = "made"
"""The key of a placeholder for a call's result. Its value is the call's place among the captured calls."""

OWN = {"live": type_name(Own)}
"""The placeholder for the model's own tensors."""


def place_of(packed: Any) -> int:
    """Return the place of the call that made the placeholder's result, or -1 if the value is not a placeholder."""
    place = packed.get(MADE) if isinstance(packed, dict) else None
    return place if isinstance(place, int) else -1


class _GivenPacking(Packing):
    """Packs the arguments of calls. ``places`` maps call numbers to places."""

    def __init__(self, prefix: str, places: Mapping[int, int]) -> None:
        super().__init__(prefix)
        self.places = places

    def of(self, value: Any) -> Any:
        return {MADE: self.places[value.call]} if isinstance(value, Made) else super().of(value)


@dataclass(frozen=True)
class Difference:
    """Why a step differs from the captured one, and how many of its first calls match."""

    alike: int
    reason: str


class Match:
    """Matches the calls of a step in the restarted script with the captured calls.

    Casts on both sides are ignored, and inputs are traced back through casts. A patched script may add casts or
    omit some.

    Args:
        head: the head of the captured step.
        recorded: the step.
    """

    def __init__(self, head: Head, recorded: RecordedStep) -> None:
        self._captured, self._parts, self._recorded = head.calls, head.parts, recorded
        self._casts = {number for number, call in recorded.calls.items() if _is_cast(name_of(call, {}))}
        self._left_out = {place for place, call in enumerate(head.calls) if _is_cast(call.name)}
        numbers = [number for number in recorded.calls if number not in self._casts]
        places = [place for place in range(len(head.calls)) if place not in self._left_out]
        self.own = dict(zip(numbers, places, strict=False))
        """Maps the number of each needed call that is not a cast to its place among the captured calls."""
        self._is_as_long = len(numbers) == len(places)

    def differences(self) -> Iterator[Difference]:
        """Yield how the step differs from the captured one: call by call, and then as a whole."""
        paths = paths_in(self._recorded.model)
        for number, place in self.own.items():
            now, then = name_of(self._recorded.calls[number], paths), self._captured[place].name
            if now != then:
                yield Difference(place, f"call {place + 1} is a call of {now}, and was one of {then}")
        if not self._is_as_long:
            calls = f"it makes {len(self._recorded.calls)} calls, and the captured one {len(self._captured)}"
            yield Difference(len(self.own), calls)
        parts = [[self.own[number] for number in sorted(part) if number in self.own] for part in self._recorded.given]
        if parts != [[place for place in part if place not in self._left_out] for part in self._parts]:
            yield Difference(len(self.own), "its calls lead to other losses")

    def source(self, value: Any) -> tuple[Any, int | None]:
        """Trace an argument of the step back through casts. Return its source and the earliest cast, or None."""
        cast = None
        while isinstance(value, Made) and value.call in self._casts:
            cast = value.call
            value = next(iter(self._recorded.arguments[cast][0]), None)
        return value, cast

    def captured_source(self, packed: Any) -> Any:
        """Trace an argument of a captured call back through casts, and return its source."""
        place = len(self._captured)
        while place_of(packed) in self._left_out and place_of(packed) < place:  # else the capture is damaged
            place = place_of(packed)
            packed = self._captured[place].first_argument
        return packed


CASTING = CAST_METHODS | {"to", "type", "type_as"}
"""Tensor methods that only cast."""


def _is_cast(name: str) -> bool:
    """True for a torch function that only converts its first argument to another dtype, or to the same one."""
    return name.startswith("torch.Tensor.") and name.rpartition(".")[2] in CASTING


class _GivenAgain(Unpacking):
    """Recreates the captured arguments for the calls of a matching step.

    ``casts`` maps the step's casts of input data to the captured values of that data.
    """

    def __init__(self, capture: Capture, match: Match, device: torch.device) -> None:
        super().__init__(capture, device)
        self.casts: dict[int, torch.Tensor] = {}
        self._match = match

    def of(self, packed: Any, live: Any = None) -> Any:
        """Return the value. The result of an earlier captured call becomes the result of the matching live call.

        Raises:
            PackedError: as in the base class, or a call's result and data do not match.
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
"""In bytes. safetensors reads no larger header."""


class Captures:
    """Writes the captures of a run and lists them.

    Args:
        folder: created with the first capture.
        start: how the script was started.
        most: the most captures to keep.
        largest: the most bytes of a capture.
        wanted: the number of a step to capture regardless of its outcome; 0 for none.
    """

    def __init__(self, folder: Path, start: Start, *, most: int, largest: int, wanted: int = 0) -> None:
        self._paths: dict[int, Path] = {}
        self.why_not = ""
        """Why a capture could not be written, or ""."""
        self.is_wanted = False
        """True if the next whole step must be captured, regardless of its outcome."""
        self.start = start
        self._folder = Path(os.path.abspath(folder))
        self._most = most
        self._largest = largest
        self.wanted = wanted
        """The number of the step that the user requested; 0 for none."""
        self._failed = -1

    @property
    def written(self) -> list[Path]:
        """The existing captures, in the order of writing."""
        return list(self._paths.values())

    @property
    def are_wanted(self) -> bool:
        """True if captures are allowed. A user who allows none needs no note that one was not written."""
        return self._most > 0

    def drop(self, step: int) -> None:
        """Remove the capture of the step with this number, if there is one."""
        if step in self._paths:
            with contextlib.suppress(OSError):
                self._paths.pop(step).unlink()

    def ask(self) -> None:
        """Request a capture of the next whole step."""
        self.is_wanted = True

    def begins(self, step: int) -> None:
        """Prepare for the step with this number, which is about to begin. A captured step ends a request."""
        self.is_wanted = step == self.wanted > 0 or (self.is_wanted and step - 1 not in self._paths)

    def cannot(self, step: int, why: str) -> None:
        """Record why a step could not be captured."""
        if step == self.wanted or not self.why_not:
            self.why_not, self._failed = f"step {step} {NOT_CAPTURED}: {why}", step

    def add(self, live: LiveStep) -> None:
        """Write a step. If that fails, ``why_not`` gives the reason, and the script continues."""
        try:
            self._write(live)
        except CaptureError as error:
            self.cannot(live.facts.step, str(error))
        except OSError as error:
            self.cannot(live.facts.step, f"cannot be written: {reason_of(error)}: {self._folder}")
        except Exception as error:  # noqa: BLE001 - the user's own classes may raise anything
            self.cannot(live.facts.step, f"cannot be written: {named_error(error)}")

    def _write(self, live: LiveStep) -> None:
        step = live.facts.step
        if len(self._paths) >= self._most and step not in self._paths:
            raise CaptureError(f"at most {counted(self._most, 'capture')} a run; allow more with --max-captures")
        content = content_of(live, self.start, self._largest)
        begin, end = f"{datetime.now(timezone.utc):%Y%m%dT%H%M%SZ}", of_rank(f"step-{step}", self.start.rank)
        # A unique name, even if another run captures in the same second.
        path = free_path(self._folder, begin, f"-{end}{CAPTURE_SUFFIX}")
        with contextlib.ExitStack() as stack:
            stack.callback(path.unlink, missing_ok=True)
            replace_file(path, content)
            stack.pop_all()
        self.drop(step)  # an earlier capture of the same step
        self._paths[step] = path
        self.why_not = "" if self._failed == step else self.why_not


_asked: list[Callable[[], None]] = []


@contextlib.contextmanager
def asked_from_code(ask: Callable[[], None]) -> Iterator[None]:
    """Make :func:`ask_for_capture` call ``ask`` inside this context."""
    _asked.append(ask)
    try:
        yield
    finally:
        _asked.remove(ask)


def ask_for_capture() -> bool:
    """Request a capture of the next whole step. Return False if nothing captures."""
    for ask in _asked:
        ask()
    return bool(_asked)


def content_of(live: LiveStep, start: Start, largest: int) -> bytes:
    """Return the file of a live step right before its optimizer steps, with all data that a replay elsewhere needs.

    Raises:
        CaptureError: the file would exceed ``largest`` bytes, or it cannot hold weights of the model.
    """
    recorded, model, is_alone = live.recorded, live.recorded.model, start.processes == 1
    if why := why_in_parts(model):
        raise CaptureError(why)
    # A state_dict of its own might wait for other processes.
    optimizers = [one.state_dict() if is_alone or has_its_state(one) else None for one in live.watcher.optimizers]
    parts = (list(model.parameters()), dict(recorded.state.buffers), optimizers, recorded.given)
    size = sum(map(nbytes, {id(tensor): tensor for part in parts for _, tensor in tensor_leaves(part)}.values()))
    if size > largest:
        told = f"it would take {byte_size(size)}, and at most {byte_size(largest)} are allowed"
        raise CaptureError(f"{told}; allow more with --max-capture-size")
    places = {number: place for place, number in enumerate(recorded.calls)}
    packing, paths = _GivenPacking("value", places), paths_in(model)
    calls, states = list[CapturedCall](), list[RandomState]()
    for number, call in recorded.calls.items():
        if not states or call.random_state.others(states[-1]):  # calls between two draws share one state
            states.append(call.random_state)
        name, is_lowered = name_of(call, paths), recorded.device.type in call.lowers
        given, of = packing.of(list(recorded.arguments[number])), len(states) - 1
        calls.append(CapturedCall(name, given, is_lowered, call.has_gradients, of, call.training))
    own = recorded.state.packed()
    first = {id(call.module): places[number] for number, call in reversed([*recorded.calls.items()])}
    beside = {at: state.packed(f"attribute.{at}") for state in recorded.beside for at in [first[id(state.model)]]}
    head = Head(
        **vars(live.facts),
        device=str(recorded.device),
        start=start,
        calls=tuple(calls),
        parts=tuple(tuple(places[number] for number in sorted(part)) for part in recorded.given),
        random_states=tuple(packed_random_state(state, packing) for state in states),
        random_state=packed_random_state(RandomState.now(), packing),
        attributes=own.attributes,
        beside={place: one.attributes for place, one in beside.items()},
        optimizers=tuple(map(packing.of, optimizers)),
        record=json.loads(to_json(live.watcher.record())),
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )
    tensors = {f"weight.{name}": written_form(recorded.state.before(one)) for name, one in model.named_parameters()}
    for prefix, state in (("buffer", own), *((f"beside.{place}", one) for place, one in beside.items())):
        buffers = state.buffers.items()
        tensors |= {f"{prefix}.{name}": written_form(one) for name, one in buffers if can_be_written(one)}
        tensors |= state.tensors
    text = json.dumps({**asdict(head), "loss": str(head.loss)}, allow_nan=False, ensure_ascii=True)
    if len(text) > LARGEST_HEADER:
        raise CaptureError(f"its description takes {byte_size(len(text))}")
    return save({**tensors, **packing.tensors}, metadata={FORMAT: text})
