"""The whole way from a config to a proven patch: search the pins, plan the edits, prove them, or say why not."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ampdbg.config.schema import Config
from ampdbg.diagnosis.remedies import other_remedies
from ampdbg.errors import WorkloadError
from ampdbg.observer import UNOBSERVED, Observer
from ampdbg.patch.by_name import MODULE_NAME, module_text
from ampdbg.patch.edits import Refused
from ampdbg.patch.file_edits import FileEdit, base_folder, file_diff
from ampdbg.patch.own_lines import own_lines
from ampdbg.patch.plan import (
    WAYS,
    Materials,
    Patch,
    Rest,
    constants_kept,
    lines_that_may_be_edited,
    planned,
    wider_than,
)
from ampdbg.pinning.bisection import Bisected, bisected, scales_of
from ampdbg.pinning.pin_set import digest, tied_together
from ampdbg.probes.half_names import names_seen
from ampdbg.proof.jobs import CapturedStep, Job, Patched
from ampdbg.proof.processes import FreshProcesses, JobStarter
from ampdbg.proof.proof import needed_units, prove, unneeded_unit
from ampdbg.record.codes import CODES
from ampdbg.record.findings import Source
from ampdbg.record.pins import EVERYTHING, Form, Handover, PatchUnit, Proof, RootModel, Strategy, in_words, root_of
from ampdbg.record.run import Record
from ampdbg.replay.replay import Manner, replay_step
from ampdbg.replay.snapshot import weights_of
from ampdbg.source.ownership import is_users_file

PROVEN_STEPS = 200
"""The patched run is trained for so many steps, or to a little beyond the failing step."""

BEYOND = 20

CODE_NEEDS_AUTOCAST = (
    "at level {level} pins are settings of the config; ampdbg writes patches of code only for autocast: --set "
    "precision.level=O1"
)


Prover = Callable[[Patched, Mapping[str, Patched]], Proof]
"""Proves a patch, of which parts can be left out: the patch without each of them, by its title."""


@dataclass(frozen=True)
class Suggestion:
    """The record of a suggestion, and the ``edits`` of its patch, which the record has as diffs."""

    record: Record
    edits: tuple[FileEdit, ...] = ()


def suggest(
    config: Config,
    *,
    form: Form = "diff",
    verify: bool = True,
    known: Record | None = None,
    strategy: Strategy = "guided",
    max_trials: int | None = None,
    observer: Observer = UNOBSERVED,
) -> Suggestion:
    """Trains, bisects, plans the patch or the pins by name, and proves it.

    Args:
        form: what is to be suggested. Where weights are half it is YAML in any case: edits of code rely on autocast.
        verify: prove it.
        known: a record of this config: files that have changed since are refused.

    The other arguments are those of :func:`~ampdbg.pinning.bisection.bisect_run`.

    Returns:
        The suggestion. After an interrupt its record is ``interrupted`` and it has no edits; a search that had ended
        by then stands, and the record has the patch that was being proven.

    Raises:
        WorkloadError: a target cannot be used, or a file is not what it was when ``known`` was made.
        UserCodeError: the user's code raised, and would have raised in FP32 too.
    """
    _refuse_stale(known)
    if config.precision.has_half_weights:
        form = "yaml"
    with FreshProcesses(config.start) as start:
        if verify:
            start.warm()
        with bisected(config, strategy, max_trials, observer) as searched:
            return suggestion_of(searched, form, start if verify else None, observer)


def suggestion_of(
    searched: Bisected,
    form: Form,
    start: JobStarter | None,
    observer: Observer,
    captured: CapturedStep | None = None,
    why_no_patch: str = "",
) -> Suggestion:
    """What comes of a search that has ended; ``captured`` is the failing step's capture, where it is a script's.

    ``start`` begins what a proof needs fresh processes for; without it nothing is proven. ``why_no_patch`` says why
    one hardly can, where none is proven.
    """
    ended = replace(searched, record=_handed_over(searched, form))
    found = Suggestion(ended.record)
    prover = functools.partial(_proof, ended, observer, captured, start) if start is not None else None
    with contextlib.suppress(KeyboardInterrupt):
        found = _of_search(ended, form, prover, observer, trains=captured is None)
        is_proven = found.record.verification is not None and found.record.verification.passed
        if why_no_patch and not is_proven:  # a line that casts back itself may be cured all the same
            refused = _with(found.record, names=(), helper="", files=(), units=(), refused=(why_no_patch,))
            found = Suggestion(replace(refused, verification=None))
        return replace(found, record=replace(found.record, elapsed=ended.run.elapsed))
    # While the patch was planned or proven: what the search has found stands.
    return Suggestion(replace(ended.record, interrupted=True, elapsed=ended.run.elapsed))


def _of_search(ended: Bisected, form: Form, prover: Prover | None, observer: Observer, *, trains: bool) -> Suggestion:
    """What comes of it, in the form that is asked for; a proof ``trains`` with the patch too, or it cannot."""
    record = ended.record
    if record.interrupted or not ended.failing or not (record.pins or _constants(record)):
        return Suggestion(record)
    if form in ("module", "yaml"):
        names_say_it_all = record.pins and all(pin.source is None for pin in record.pins)  # a loss's line has none
        return _by_name(ended, form, prover) if prover and names_say_it_all else Suggestion(record)
    observer.stage("planning the patch")
    return _with_patch(record, _materials(ended), prover, trains=trains)


def _handed_over(searched: Bisected, form: Form) -> Record:
    """The record of the search, with what there is to hand over but for a patch."""
    record, config = searched.record, searched.run.config
    names = record.pin_names
    folder, is_git = base_folder((), config.folder)
    helper = module_text(names, _roots(names, searched)) if form == "module" and names else ""
    precision = config.precision
    notes = (CODE_NEEDS_AUTOCAST.format(level=precision.level),) if precision.has_half_weights else ()
    handover = Handover(form, names, helper, str(folder), is_git, notes=(*other_remedies(record), *notes))
    return replace(record, command="suggest-fp32", handover=handover)


def _constants(record: Record) -> tuple[Source, ...]:
    """The lines of the user's own on which a constant stands that half cannot hold; none where that is not all."""
    roots = [finding for finding in record.faults if finding.root is None]
    lines = tuple(finding.source for finding in roots if finding.source and is_users_file(finding.source.file))
    return lines if len(lines) == len(roots) and all(CODES[one.code].is_a_constant for one in roots) else ()


def _roots(names: Sequence[str], searched: Bisected) -> tuple[RootModel, ...]:
    own = set(map(root_of, names))
    return tuple(root for root in searched.record.roots if root.name in own)


def _with_patch(record: Record, materials: Materials, prover: Prover | None, *, trains: bool) -> Suggestion:
    """The narrowest patch that holds; a wider one is tried where a narrower does not.

    A constant that is kept in range needs no pin at all. One that computes something else then, such as a larger eps,
    may hold in one step and not in the next: where nothing is trained with it, pins come first. What is only tied to a
    module that goes wrong, or calls another such one, is left as it is first. What the proof shows that the rest of a
    patch does not need, is left out of it: what an edit hands on in FP32 may cure the next line too.
    """
    failed: list[tuple[Patch, Proof]] = []
    shown: set[str] = set()
    refused: tuple[str, ...] = ()
    pins = tuple(pin for pin in materials.pins if pin.sites or not (pin.tied or pin.source))
    needed = replace(materials, pins=pins)
    plans = [functools.partial(planned, needed, ways) for ways in WAYS] if needed.pins else []
    plans += [functools.partial(planned, materials, ways) for ways in WAYS] if needed != materials else []
    if prover is not None and (constants := _constants(record)):  # pins have been tried by the search
        is_other = any(CODES[finding.code].changes_function for finding in record.findings if finding.root is None)
        plans.insert(
            len(plans) if is_other and not trains else 0, functools.partial(constants_kept, constants, materials)
        )
    while plans:
        plan = plans.pop(0)
        patch = plan()
        refused = refused or tuple(_reasons((*patch.refused, *patch.left)))
        lacking = patch.refused if prover is not None else (*patch.refused, *patch.left)
        if not patch.edits or lacking or any(patch.edits == other.edits for other, _ in failed):
            continue
        if prover is None:
            return _patched_by(patch, record)
        try:
            patched = replace(_patched(patch.edits), moves_constants=patch.moves_constants)
            # What is known to be needed is left out last, and not again for each part that is not.
            parts = sorted(patch.without, key=lambda title: title not in shown)
            proof = prover(patched, {title: _without(patch.without[title]) for title in parts})
        except KeyboardInterrupt:
            unproven = _patched_by(patch, replace(record, interrupted=True))
            return replace(unproven, edits=())  # not proven, it is not to be written
        if proof.passed:
            narrower = ((p, why.failure) for p, why in failed if not (p.moves_constants or unneeded_unit(why)))
            patch = next((wider_than(*other, patch) for other in narrower), patch)
            return _patched_by(patch, replace(record, verification=proof))
        failed.append((patch, proof))
        shown |= needed_units(proof)
        plans[:0] = _without_the_unneeded(plan, patch, proof)
    tried = tuple(PatchUnit(" and ".join(one.title for one in p.units), (), (why.failure,)) for p, why in failed)
    record = replace(record, verification=failed[0][1] if failed else None)
    return Suggestion(_with(record, refused=refused, units=tried))


def _without_the_unneeded(plan: functools.partial[Patch], patch: Patch, proof: Proof) -> list[functools.partial[Patch]]:
    """The plan without the unit that the proof shows not to be needed; none where it needs all of them."""
    title = unneeded_unit(proof)
    left_out = (*plan.keywords.get("unneeded", ()), title)
    return [functools.partial(plan, unneeded=left_out)] if title and len(patch.units) > 1 else []


def _patched_by(patch: Patch, record: Record) -> Suggestion:
    assert record.handover is not None
    folder, is_git = base_folder(patch.edits, Path(record.handover.folder))
    files = tuple(file_diff(edit, folder) for edit in patch.edits)
    return Suggestion(_with(record, folder=str(folder), is_git=is_git, files=files, units=patch.units), patch.edits)


def _with(record: Record, **fields: Any) -> Record:
    return replace(record, handover=replace(record.handover, **fields)) if record.handover is not None else record


def _reasons(refused: Sequence[Refused]) -> Iterator[str]:
    """Each reason once for each file, with its lines."""
    lines: dict[tuple[str, str], list[int]] = {}
    for one in refused:
        lines.setdefault((one.file, one.reason), []).append(one.line)
    for (file, reason), numbers in lines.items():
        known = ", ".join(str(number) for number in dict.fromkeys(numbers) if number)
        place = f"{file}:{known}" if known else file
        yield f"{place}: {reason}" if place else reason


def _by_name(ended: Bisected, form: Form, prover: Prover) -> Suggestion:
    """The pins by name, proven in the form that they are handed over in."""
    file = ended.run.config.folder / f"{MODULE_NAME}.py"

    def patched(names: Sequence[str]) -> Patched:
        if form == "yaml":
            return Patched(pins=tuple(name or EVERYTHING for name in names))
        if not names:
            return Patched()
        roots = _roots(names, ended)
        return Patched({file: module_text(names, roots).encode()}, pins_file=file, roots=roots)

    names = [pin.name for pin in ended.record.pins]
    parts = tied_together(names, ended.run.workload.model)
    without = {
        " and ".join(map(in_words, part)): patched([name for name in names if name not in part]) for part in parts
    }
    return Suggestion(replace(ended.record, verification=prover(patched(names), without)))


def _patched(edits: Sequence[FileEdit]) -> Patched:
    return Patched({edit.path: edit.after for edit in edits})


def _without(rest: Rest) -> Patched:
    standing = replace(_patched(rest.lines), pins=tuple(name or EVERYTHING for name in rest.names))
    return replace(_patched(rest.edits), standing=standing)


def _proof(
    ended: Bisected,
    observer: Observer,
    captured: CapturedStep | None,
    start: JobStarter,
    patched: Patched,
    without: Mapping[str, Patched],
) -> Proof:
    config, record = ended.run.config, ended.record
    last = max(step.snapshot.step for step in ended.failing)
    job = Job(
        "patched",
        config,
        patched,
        scales=tuple(scales_of(config, record, step) for step in ended.failing),
        is_silent=CODES[record.findings[0].code].erases_itself,
        repeats=record.search.repeats if record.search is not None else 1,
        train_steps=min(config.train.steps, max(PROVEN_STEPS, last + BEYOND)),
        captured=captured,
    )
    return prove(job, ended.run, ended.failing, without, observer, start)


def _materials(ended: Bisected) -> Materials:
    """What a plan needs, and what holds half tensors in the functions that may be edited, as the failing step runs."""
    pins, run, first = ended.record.pins, ended.run, ended.failing[0]
    model = run.workload.model
    lines = own_lines(run, ended.failing, pins)
    half = Manner(first.made.low.dtype, first.scale, is_lifted=False)
    edited = lines_that_may_be_edited(pins, lines, model) | {(one.file, one.line) for one in _constants(ended.record)}
    with weights_of(model, first), names_seen(edited) as names:
        replay_step(run, first.snapshot, half)
    # What a replay runs itself is known from it; of what it does not run it has seen nothing.
    seen = {line: found for line, found in names.items() if found.half or found.full}
    return Materials(model, pins, lines, {**run.names, **seen}, run.makings)


def _refuse_stale(known: Record | None) -> None:
    """Lines of a file that has changed are not the lines that failed."""
    for file, before in (known.search.sources if known is not None and known.search is not None else {}).items():
        if digest(file) != before:
            raise WorkloadError(
                f"{file} has changed since the record was made, so its line numbers may be wrong; give the "
                "config instead of the record to run everything again"
            )
