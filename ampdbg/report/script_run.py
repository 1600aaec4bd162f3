"""What a page says of a script that was watched: its captures, and what to type next."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import PurePath

from ampdbg.formats import FORMATS
from ampdbg.obstacles import obstacle_in
from ampdbg.quantities import number, scale, share
from ampdbg.record.codes import catalogued
from ampdbg.record.replays import Replay
from ampdbg.record.run import NOT_CAPTURED, Record

from . import view

REPLAY_COLUMNS = (
    view.Column("precision"),
    view.Column("loss", "number"),
    view.Column("gradient norm", "number"),
    view.Column("gradients off by", "number"),
)

CLOSER_LOOK = 50
"""The step that a healthy script is to capture: by then a loss scale has settled."""


def captures_of(record: Record, typed: view.Typed) -> Iterator[str]:
    """Where its captures are."""
    if record.command == "run" and record.script is not None and record.script.captures:
        paths = [_to_type(path, typed.folder) for path in record.script.captures]
        yield f"Captured: {' '.join(paths)}"


def sound_step(record: Record) -> Iterator[view.Table]:
    """A step that did not fail, with what it comes to in each precision, which no finding tells: of a capture, and
    where it raises in one of them, so that nothing can be held against that."""
    made = next((made for made in record.investigations if made.why == "end"), None)
    errors = [replay for replay in made.replays if replay.error] if made is not None else []
    if made is not None and (record.command == "replay" or errors):
        below = tuple(view.line(f"in {_precision(one)} {one.error}", tone="doubtful") for one in errors)
        rows = tuple(map(_replay_row, made.replays))
        yield view.Table(f"Step {made.step}, run again", REPLAY_COLUMNS, rows, below=below)


def _replay_row(replay: Replay) -> tuple[str, ...]:
    distance = "" if replay.gradient_distance is None else share(replay.gradient_distance)
    if replay.error:
        return _precision(replay), "raises", "-", distance
    return _precision(replay), number(replay.loss), number(replay.grad_norm), distance


def _precision(replay: Replay) -> str:
    short = FORMATS[replay.dtype].short if replay.dtype in FORMATS else replay.dtype
    return short if replay.dtype == "float32" else f"{short}, loss scale {scale(replay.scale)}"


def pin_may_help(record: Record) -> bool:
    """Whether the first finding is one that FP32 cures."""
    first = (finding for finding in record.findings[:1] if not finding.has_spoilt_input)
    return record.verdict == "precision" and any(catalogued(finding.code).pin_helps for finding in first)


def only_settles(record: Record) -> bool:
    """Whether nothing is wrong, and no step was taken yet: nothing is to be cured, and a longer run shows more."""
    return record.took_no_step and all(finding.severity == "info" for finding in record.findings)


def after_script(record: Record, typed: view.Typed) -> view.NextCommand | None:
    """What to type: with a GPU that is emulated, of its capture, what the finding means, or a closer look."""
    obstacle = obstacle_in(record.error)
    if obstacle is not None and obstacle.install:
        return view.NextCommand("install it where ampdbg is installed", obstacle.install)
    has_no_gpu = not record.environment.emulated and record.environment.device == "cpu"
    if has_no_gpu and (obstacle is not None or _ran_in_fp32(record)):
        return view.NextCommand("run it in FP16, with the GPU that ampdbg emulates", _again(record, typed, "--emulate"))
    captures = record.script.captures if record.script is not None else ()
    of_root = _of_root(captures, record) if pin_may_help(record) else None
    if of_root is not None:
        what = "the patch that cures it, proven on the step that was captured"
        is_of_capture = record.command == "replay" and "--script" in typed.config
        taken = typed.config if is_of_capture else _capture_to_type(of_root, record, typed.folder)
        return view.NextCommand(what, f"ampdbg suggest-fp32 {taken}")
    if captures and record.command == "run" and not record.investigations:
        what = "the step that was captured, run again in FP32 too"
        return view.NextCommand(what, f"ampdbg replay {_capture_to_type(captures[0], record, typed.folder)}")
    if record.findings and record.verdict != "healthy" and not only_settles(record):
        return view.NextCommand("what it means, and what cures it", f"ampdbg explain {record.findings[0].code}")
    return _closer_look(record, typed)


def _ran_in_fp32(record: Record) -> bool:
    """Whether no step ran in half precision, and that may be why nothing else was found."""
    return record.environment.policy == "none" and (not record.findings or record.verdict == "inconclusive")


def _closer_look(record: Record, typed: view.Typed) -> view.NextCommand | None:
    """A capture of a step that looks healthy; what ampdbg replay then finds, no loss and no gradient shows."""
    is_plain = record.command == "run" and record.verdict == "healthy" and not record.error
    is_alone = record.script is not None and record.script.processes == 1 and not record.script.captures
    is_long = record.steps_run > CLOSER_LOOK and record.environment.policy != "none"
    can_be = not any(NOT_CAPTURED in note for note in record.unseen.notes)
    if not (is_plain and is_alone and is_long and can_be):
        return None
    emulated = ("--emulate",) * record.environment.emulated
    what = "capture one step for ampdbg replay, which finds what shows in no loss"
    return view.NextCommand(what, _again(record, typed, *emulated, f"--capture-step {CLOSER_LOOK}"))


def _again(record: Record, typed: view.Typed, *options: str) -> str:
    is_module = record.script is not None and record.script.is_module
    return " ".join(["ampdbg run", *options, *["-m"] * is_module, typed.config])


def _of_root(captures: Sequence[str], record: Record) -> str | None:
    """The capture of the step that the first finding is about, or the first behind it; one before it is of another."""
    root = record.findings[0]
    wanted = (root.replayed_step, *range(root.step, root.replayed_step))
    steps = {int(found[1]): path for path in captures if (found := re.search(r"-step-(\d+)\.[a-z]+$", path))}
    later = [path for step, path in sorted(steps.items()) if step >= root.step]
    return next((steps[step] for step in wanted if step in steps), next(iter(later), None))


def _capture_to_type(path: str, record: Record, folder: str) -> str:
    """A capture with its script, where that does not stand in the folder: what a capture starts has to be said then."""
    script, typed = record.script, _to_type(path, folder)
    if script is None or script.is_module or not folder:
        return typed
    at = PurePath(os.path.normpath(os.path.join(folder, script.name)))
    if at.is_relative_to(folder):
        return typed
    return f"{typed} --script {shlex.quote(shlex.join([script.name, *script.arguments]))}"


def _to_type(path: str, folder: str) -> str:
    """A path as a shell takes it, from the folder where it lies below that."""
    below = PurePath(path)
    return shlex.quote(str(below.relative_to(folder) if folder and below.is_relative_to(folder) else below))
