"""The captures of a run: its failing steps, each written to a file of its own while the script waits."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from ampdbg.diagnosis.cause import LONGEST_TURN
from ampdbg.errors import named_error
from ampdbg.files import replace_file
from ampdbg.probes.tensors import leaves_of
from ampdbg.quantities import byte_size, counted
from ampdbg.record.file import CAPTURE_SUFFIX, of_rank, to_json
from ampdbg.record.run import NOT_CAPTURED, Record
from ampdbg.replay.investigation import Why
from ampdbg.replay.packing import Packing, can_be_written, packed_random_state, written_form
from ampdbg.replay.pass_end import module_of
from ampdbg.replay.played_step import PlayedStep
from ampdbg.replay.random_state import RandomState
from ampdbg.replay.snapshot import ModelState
from ampdbg.script.capture import FORMAT, IN_A_GROUP, CaptureError, Head, Start
from ampdbg.script.captured_calls import CapturedCall, name_of, order_of, paths_in, reads_of
from ampdbg.script.launch import Script, launched_as
from ampdbg.script.played_run import Half
from ampdbg.script.ranks import has_its_state, why_in_parts

LARGEST_HEADER = 100_000_000
"""Bytes: safetensors reads no larger one."""

ENVIRONMENT = (
    "CUDA_VISIBLE_DEVICES",
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    IN_A_GROUP,
)
"""What of the environment changes numbers, or what a script does: it is told of, and not set as it was."""


class Captures:
    """Where the captures of a run go, and those that were written.

    Where there are as many as may be, the next takes the place of one that a loss scale has settled in: every run has
    those, and one that fails much later would have no capture of its failure. A lost step is captured by its modules
    alone, for it may be the only one; a whole one that fails soon after takes its place.

    Args:
        folder: is made with the first.
        start: how the script was started.
        most: there are never more.
        largest: the bytes that each may have.
        wanted: the step of this number is one, whatever it does; 0 for none.
    """

    def __init__(self, folder: Path, start: Start, *, most: int, largest: int, wanted: int = 0) -> None:
        self.written: list[Path] = []
        """Those that are there, in the order of their steps."""
        self.why_not = ""
        """Why one was not written."""
        self.is_wanted = False
        """Whether the next whole step is to be captured, whatever it does."""
        self.start = start
        self._settling: list[Path] = []
        """Those of them that may have to go, the first last; what was asked for stays."""
        self._stand_ins: list[int] = []
        """The steps that were captured by their modules alone, and whose scripts went on."""
        self._folder = Path(os.path.abspath(folder))
        self._most = most
        self._largest = largest
        self.wanted = wanted
        """The number of the step that was asked for from outside; 0 for none."""
        self._failed = -1

    @property
    def are_wanted(self) -> bool:
        """Whether any may be written; who allows none need not be told that one was not."""
        return self._most > 0

    @property
    def has_room(self) -> bool:
        """Whether one more may be written."""
        return len(self.written) < self._most or bool(self._settling)

    def has(self, step: int) -> bool:
        """Whether the step of this number was captured."""
        return self._of(step) is not None

    def _of(self, step: int) -> Path | None:
        ending = f"-{self._name(step)}{CAPTURE_SUFFIX}"
        return next((path for path in self.written if path.name.endswith(ending)), None)

    def drop(self, step: int) -> None:
        """Removes the capture of the step of this number, if there is one."""
        path = self._of(step)
        if path is not None:
            self.written.remove(path)
            self._settling = [other for other in self._settling if other != path]
            with contextlib.suppress(OSError):
                path.unlink()

    def _name(self, step: int) -> str:
        return of_rank(f"step-{step}", self.start.rank)

    def ask(self) -> None:
        """The next whole step is to be captured."""
        self.is_wanted = True

    def begins(self, step: int) -> None:
        """To be called when the step of this number is about to begin."""
        self.is_wanted |= step == self.wanted > 0

    def take_request(self) -> bool:
        """Whether the step that begins is the one that was asked for; a later one has to be asked for again."""
        is_wanted, self.is_wanted = self.is_wanted, False
        return is_wanted

    def cannot(self, step: int, why: str) -> None:
        """Notes that a step could not be captured."""
        if step == self.wanted or not self.why_not:
            self.why_not, self._failed = f"step {step} {NOT_CAPTURED}: {why}", step

    def add(self, step: int, make: Callable[[], Captured], *, is_wanted: bool = False) -> None:
        """Writes the one that ``make`` makes; where that cannot be, ``why_not`` says why, and the script goes on."""
        try:
            self._write(make(), is_wanted)
        except Exception as error:  # noqa: BLE001 - whatever the user's own classes raise
            self.cannot(step, named_error(error))

    def _write(self, captured: Captured, is_wanted: bool) -> None:
        if not self.has_room and not self.has(captured.step):
            allowed = f"{counted(self._most, 'capture')} a run"
            self.cannot(captured.step, f"at most {allowed}; allow more with --max-captures")
            return
        now = f"{datetime.now(timezone.utc):%Y%m%dT%H%M%SZ}"
        path = self._folder / f"{now}-{self._name(captured.step)}{CAPTURE_SUFFIX}"
        try:
            captured.write(path, self._largest)
        except CaptureError as error:
            self.cannot(captured.step, str(error))
            return
        earlier = self._of(captured.step)  # of another turn
        if earlier == path:
            self.written.remove(path)
        elif earlier is not None:
            self.drop(captured.step)
        elif len(self.written) == self._most:
            replaced = self._settling.pop()
            self.written.remove(replaced)
            with contextlib.suppress(OSError):
                replaced.unlink()
        self.written.append(path)
        self.why_not = "" if self._failed == captured.step else self.why_not
        self._rank(captured, path, is_wanted)

    def _rank(self, captured: Captured, path: Path, is_wanted: bool) -> None:
        """Notes whether the one at the path may have to go, and removes those that have stood in for it."""
        if captured.stands_in:
            self._stand_ins.append(captured.step)
            self._settling.insert(0, path)
            return
        near = [step for step in self._stand_ins if 0 < captured.step - step <= LONGEST_TURN]
        for step in near if captured.why == "loss" else ():  # one that was asked for may be of a sound step
            self._stand_ins.remove(step)
            self.drop(step)
        if captured.is_settling and not is_wanted:
            self._settling.append(path)


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


def start_of(script: Script, *, emulate: bool) -> Start:
    """How a script is about to be started, from this folder."""
    environment = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
    return Start(script.name, script.arguments, script.is_module, os.getcwd(), emulate, environment, *launched_as())


@dataclass(frozen=True)
class Captured:
    """A step at hand, right before its optimizer would step, and all that is to be known of it elsewhere.

    ``scale`` is its loss scale and ``state`` the model's from before the step; ``record`` is that of the run so far.
    """

    played: PlayedStep
    model: torch.nn.Module
    state: ModelState
    optimizers: Sequence[torch.optim.Optimizer]
    scaler: torch.amp.GradScaler | None
    step: int
    scale: float
    loss: float
    why: Why
    half: Half | None
    record: Record
    start: Start
    is_broken_off: bool = False
    """Whether nothing has gone backward from its loss when it was captured: its pass is that of an ``OpenPass``."""
    stands_in: bool = False
    """Whether the script goes on behind it, and a later step of the same failure may be captured whole."""
    weights_grew: float = 1.0
    scaler_number: int = 0
    computed: tuple[str, ...] = ()

    @property
    def is_settling(self) -> bool:
        """Whether its gradients overflow at a loss scale that no step of the run has borne so far."""
        return self.why == "gradients" and all(step.skipped or step.scale < self.scale for step in self.record.steps)

    @property
    def size(self) -> int:
        """About how many bytes a file of it takes."""
        parts = (list(self.model.parameters()), dict(self.state.buffers), self._states, self.played.given)
        tensors = {id(tensor): tensor for part in parts for _, tensor in leaves_of(part)}
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())

    @functools.cached_property
    def _states(self) -> Sequence[Any]:
        """Those of the optimizers; None for one that might wait for other processes to give it."""
        is_alone = self.start.processes == 1
        return [one.state_dict() if is_alone or has_its_state(one) else None for one in self.optimizers]

    def write(self, path: Path, largest: int) -> None:
        """Writes it whole, or not at all.

        Raises:
            CaptureError: it is larger than ``largest`` bytes, it holds what cannot be written, or the disk is full.
        """
        if self.start.processes > 1 and (why := why_in_parts(self.model)):
            raise CaptureError(why)
        if self.size > largest:
            told = f"it would be {byte_size(self.size)}, and at most {byte_size(largest)} are allowed"
            raise CaptureError(f"{told}; allow more with --max-capture-size")
        try:
            content = self._content()
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, content)
        except OSError as error:
            raise CaptureError(f"cannot be written: {error.strerror or error}: {path}") from None
        except CaptureError:
            raise
        except Exception as error:
            raise CaptureError(f"cannot be written: {named_error(error)}: {path}") from error

    def _content(self) -> bytes:
        packing = Packing("value")
        head = self._head(packing)
        tensors = {f"weight.{name}": written_form(one) for name, one in self.model.named_parameters()}
        tensors |= {
            f"buffer.{name}": written_form(one) for name, one in self.state.buffers.items() if can_be_written(one)
        }
        for place, state in _states_beside(self.played, order_of(self.played)):
            buffers = state.buffers.items()
            tensors |= {f"beside.{place}.{name}": written_form(one) for name, one in buffers if can_be_written(one)}
        text = json.dumps({**asdict(head), "loss": str(head.loss)}, allow_nan=False, ensure_ascii=True)
        if len(text) > LARGEST_HEADER:
            raise CaptureError(f"what it is told of takes {byte_size(len(text))}")
        return save({**tensors, **packing.tensors}, metadata={FORMAT: text})

    def _head(self, packing: Packing) -> Head:
        numbers = order_of(self.played)
        states: list[RandomState] = []
        paths = paths_in(self.model)
        calls = tuple(_captured_call(self.played, number, numbers, paths, packing, states) for number in numbers)
        return Head(
            step=self.step,
            scale=self.scale,
            loss=self.loss,
            why=self.why,
            half=self.half,
            is_broken_off=self.is_broken_off,
            weights_grew=self.weights_grew,
            scaler_number=self.scaler_number,
            computed=self.computed,
            replaced=self.played.replaced,
            device=str(next(self.model.parameters()).device),
            start=self.start,
            calls=calls,
            parts=tuple(tuple(numbers[number] for number in sorted(part)) for part in self.played.given),
            losses=tuple(
                tuple((numbers[made.call], made.path) for made in self.played.losses[min(part)])
                for part in self.played.given
            ),
            random_states=tuple(packed_random_state(state, packing) for state in states),
            random_state=packed_random_state(RandomState.now(), packing),
            attributes=dict(_packed_attributes(self.state, packing)),
            beside={
                place: dict(_packed_attributes(state, packing)) for place, state in _states_beside(self.played, numbers)
            },
            optimizers=tuple(map(packing.of, self._states)),
            scaler=packing.of(self.scaler.state_dict() if self.scaler is not None else None),
            record=json.loads(to_json(self.record)),
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )


def _states_beside(played: PlayedStep, numbers: Mapping[int, int]) -> Iterator[tuple[int, ModelState]]:
    """What modules beside the model held, each with the place of the first call of it."""
    for module, state in played.beside:
        places = [place for number, place in numbers.items() if module_of(played.calls[number]) is module]
        if places:
            yield min(places), state


def _captured_call(
    played: PlayedStep,
    number: int,
    numbers: Mapping[int, int],
    paths: Mapping[int, str],
    packing: Packing,
    states: list[RandomState],
) -> CapturedCall:
    call = played.calls[number]
    given = next(part[number] for part in played.given if number in part)
    if not states or not _is_same(states[-1], call.random_state):  # between two draws all calls have one state
        states.append(call.random_state)
    return CapturedCall(
        name=name_of(call, paths),
        reads=reads_of(call, numbers),
        given=packing.of(list(given)),
        lowers=call.lowers,
        has_gradients=call.has_gradients,
        writes=call.writes,
        random_state=len(states) - 1,
        hands_on=call.hands_on,
    )


def _is_same(one: RandomState, other: RandomState) -> bool:
    tensors = [(one.cpu, other.cpu), *zip(one.devices, other.devices, strict=False)]
    if one.python != other.python or not all(torch.equal(*pair) for pair in tensors):
        return False
    first, second = one.numpy, other.numpy
    return str(first) == str(second) if first is None or second is None else bool((first[1] == second[1]).all())


def _packed_attributes(state: ModelState, packing: Packing) -> Iterator[tuple[str, dict[str, Any]]]:
    """Those attributes that can be written as they are; a model that is built anew has the others of its own."""
    for name, saved in state.attributes.items():
        packed = {key: packing.of(value) for key, value in saved.items()}
        whole = {key: value for key, value in packed.items() if not _is_live(value)}
        if whole:
            yield name, whole


def _is_live(packed: Any) -> bool:
    """Whether a packed value needs one that is at hand."""
    if isinstance(packed, dict):
        return "live" in packed or "like" in packed or any(map(_is_live, packed.values()))
    return isinstance(packed, list) and any(map(_is_live, packed))
