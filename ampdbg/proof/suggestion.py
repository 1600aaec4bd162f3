"""The way from a config to a proven patch: search pins, plan edits, prove them, or report the reason for failing."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ampdbg.config.schema import Config
from ampdbg.costs.step import step_costs
from ampdbg.diagnosis.remedies import other_remedies
from ampdbg.errors import WorkloadError
from ampdbg.observer import UNOBSERVED, Observer
from ampdbg.patch.by_name import MODULE_NAME, module_text
from ampdbg.patch.edits import Refused
from ampdbg.patch.file_edits import FileEdit, Patched, base_folder, bytes_by_path, file_diff
from ampdbg.patch.own_lines import own_lines
from ampdbg.patch.plan import (
    WAYS,
    Patch,
    PlanInputs,
    constants_kept,
    lines_that_may_be_edited,
    planned,
    wider_than,
)
from ampdbg.pinning.bisection import Bisected, bisected, scales_of
from ampdbg.pinning.pin_set import digest, tied_together
from ampdbg.probes.half_names import names_seen
from ampdbg.proof.jobs import CapturedStep, FreshProcesses, Job, JobStarter
from ampdbg.proof.proof import needed_units, prove, unneeded_unit
from ampdbg.record.codes import catalogued
from ampdbg.record.findings import Source
from ampdbg.record.pins import EVERYTHING, Form, Handover, PatchUnit, Proof, RootModel, Strategy, in_words, root_of
from ampdbg.record.run import Record
from ampdbg.replay.replay import Manner, replay_step
from ampdbg.replay.snapshot import weights_of
from ampdbg.source.ownership import is_users_file

PROVEN_STEPS = 200
"""The patched run trains for this many steps, or to BEYOND steps after the failing step if that is more."""

BEYOND = 20

CODE_NEEDS_AUTOCAST = (
    "at level {level} pins are settings of the config; ampdbg writes patches of code only for autocast: --set "
    "precision.level=O1"
)


Prover = Callable[[Patched, Mapping[str, Patched]], Proof]
"""Proves a patch. The mapping has the patch without each omissible part, by the part's title."""


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
    """Train, bisect, plan the patch or the pins by name, and prove it.

    With half weights the ``form`` is always YAML, because edits of code need autocast. Files changed since ``known``
    was recorded are refused. See :func:`~ampdbg.pinning.bisection.bisect_run` for the other arguments.

    After an interrupt, the record is ``interrupted``, with a finished search and the unproven patch, but no edits.

    Raises:
        WorkloadError: a target cannot be used, or a file has changed.
        UserCodeError: the user's code raised, and would also raise in FP32.
    """
    for file, before in (known.search.sources if known is not None and known.search is not None else {}).items():
        if digest(file) != before:
            raise WorkloadError(
                f"{file} has changed since the record was made, so its line numbers may be wrong; give the "
                "config instead of the record to run everything again"
            )
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
    """Return the suggestion for a finished search.

    Without ``start``, which starts jobs in fresh processes, nothing is proven. ``captured`` is the capture of a
    script's failing step. ``why_no_patch`` is shown instead of an unproven patch.
    """
    ended = replace(searched, record=_handed_over(searched, form))
    prover = functools.partial(_proof, ended, observer, captured, start) if start is not None else None
    with contextlib.suppress(KeyboardInterrupt):
        found = _of_search(ended, form, prover, observer, trains=captured is None)
        is_proven = found.record.verification is not None and found.record.verification.passed
        if why_no_patch and not is_proven:  # a line that casts back to half can still be cured
            refused = _with(found.record, names=(), helper="", files=(), units=(), refused=(why_no_patch,))
            found = Suggestion(replace(refused, verification=None))
        return replace(found, record=replace(found.record, elapsed=ended.run.elapsed))
    # Interrupted during planning or proof: the search's result stands.
    return Suggestion(replace(ended.record, interrupted=True, elapsed=ended.run.elapsed))


def _of_search(ended: Bisected, form: Form, prover: Prover | None, observer: Observer, *, trains: bool) -> Suggestion:
    """Return the suggestion in the requested form; ``trains`` is true if the proof trains with the patch."""
    record = ended.record
    if record.interrupted or not ended.failing or not (record.pins or _constants(record)):
        return Suggestion(record)
    if form in ("module", "yaml"):
        names_say_it_all = record.pins and all(pin.source is None for pin in record.pins)  # a line has no name
        return _by_name(ended, form, prover) if prover and names_say_it_all else Suggestion(record)
    observer.stage("planning the patch")
    return _with_patch(record, _materials(ended), prover, trains=trains)


def _handed_over(searched: Bisected, form: Form) -> Record:
    """Return the record of the search with everything to hand over except a patch."""
    record, config = searched.record, searched.run.config
    names = record.pin_names
    folder, is_git = base_folder((), config.folder)
    helper = module_text(names, _roots(names, searched)) if form == "module" and names else ""
    precision = config.precision
    notes = (CODE_NEEDS_AUTOCAST.format(level=precision.level),) if precision.has_half_weights else ()
    handover = Handover(form, names, helper, str(folder), is_git, notes=(*other_remedies(record), *notes))
    return replace(record, command="suggest-fp32", handover=handover)


def _constants(record: Record) -> tuple[Source, ...]:
    """Return the user's lines with constants that half cannot hold, or none if there are other causes."""
    roots = [finding for finding in record.faults if finding.root is None]
    lines = tuple(finding.source for finding in roots if finding.source and is_users_file(finding.source.file))
    return lines if len(lines) == len(roots) and all(catalogued(one.code).is_a_constant for one in roots) else ()


def _roots(names: Sequence[str], searched: Bisected) -> tuple[RootModel, ...]:
    own = set(map(root_of, names))
    return tuple(root for root in searched.record.roots if root.name in own)


def _with_patch(record: Record, materials: PlanInputs, prover: Prover | None, *, trains: bool) -> Suggestion:
    """Return the narrowest patch that is proven, trying wider patches after failures.

    Constants kept in range need no pins. If such an edit computes something else, such as a larger eps, it may hold for
    one step only. Without training, pins are then tried first. Modules that are only tied to a failing module, or only
    call one, are first left alone. Parts that the proof finds unneeded are omitted, since one edit's FP32 output may
    cure the next line.
    """
    failed: list[tuple[Patch, Proof]] = []
    shown: set[str] = set()
    refused: tuple[str, ...] = ()
    pins = tuple(pin for pin in materials.pins if pin.sites or not (pin.tied or pin.source))
    needed = replace(materials, pins=pins)
    plans = [functools.partial(planned, needed, ways) for ways in WAYS] if needed.pins else []
    plans += [functools.partial(planned, materials, ways) for ways in WAYS] if needed != materials else []
    if prover is not None and (constants := _constants(record)):  # the search has tried pins only
        is_other = any(catalogued(finding.code).changes_function for finding in record.findings if finding.root is None)
        plans.insert(
            len(plans) if is_other and not trains else 0, functools.partial(constants_kept, constants, materials)
        )
    while plans:
        plan = plans.pop(0)
        patch = plan()
        refused = refused or tuple(_reasons((*patch.refused, *patch.unneeded_refusals)))
        lacking = patch.refused if prover is not None else (*patch.refused, *patch.unneeded_refusals)
        if not patch.edits or lacking or any(patch.edits == other.edits for other, _ in failed):
            continue
        if prover is None:
            return _patched_by(patch, record)
        try:
            patched = Patched(bytes_by_path(patch.edits), moves_constants=patch.moves_constants)
            # Parts known to be needed are omitted last, and are not tested again for each unneeded part.
            parts = sorted(patch.without, key=lambda title: title not in shown)
            proof = prover(patched, {title: patch.without[title] for title in parts})
        except KeyboardInterrupt:
            unproven = _patched_by(patch, replace(record, interrupted=True))
            return replace(unproven, edits=())  # an unproven patch must not be written
        if proof.passed:
            narrower = ((p, why.failure) for p, why in failed if not (p.moves_constants or unneeded_unit(why)))
            patch = next((wider_than(*other, patch) for other in narrower), patch)
            return _patched_by(patch, replace(record, verification=proof))
        failed.append((patch, proof))
        shown |= needed_units(proof)
        if (title := unneeded_unit(proof)) and len(patch.units) > 1:
            left_out = (*plan.keywords.get("unneeded", ()), title)
            plans.insert(0, functools.partial(plan, unneeded=left_out))
    tried = tuple(PatchUnit(" and ".join(one.title for one in p.units), (), (why.failure,)) for p, why in failed)
    record = replace(record, verification=failed[0][1] if failed else None)
    return Suggestion(_with(record, refused=refused, units=tried))


def _patched_by(patch: Patch, record: Record) -> Suggestion:
    assert record.handover is not None
    folder, is_git = base_folder(patch.edits, Path(record.handover.folder))
    files = tuple(file_diff(edit, folder) for edit in patch.edits)
    return Suggestion(_with(record, folder=str(folder), is_git=is_git, files=files, units=patch.units), patch.edits)


def _with(record: Record, **fields: Any) -> Record:
    return replace(record, handover=replace(record.handover, **fields)) if record.handover is not None else record


def _reasons(refused: Sequence[Refused]) -> Iterator[str]:
    """Yield each reason once for each file, with its lines."""
    lines: dict[tuple[str, str], list[int]] = {}
    for one in refused:
        lines.setdefault((one.file, one.reason), []).append(one.line)
    for (file, reason), numbers in lines.items():
        known = ", ".join(str(number) for number in dict.fromkeys(numbers) if number)
        place = f"{file}:{known}" if known else file
        yield f"{place}: {reason}" if place else reason


def _by_name(ended: Bisected, form: Form, prover: Prover) -> Suggestion:
    """Prove the pins by name, in the requested form."""
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
    steps = min(config.train.steps, max(PROVEN_STEPS, last + BEYOND))
    job = Job(
        "patched",
        config.model_copy(update={"train": config.train.model_copy(update={"steps": steps})}),
        patched,
        scales=tuple(scales_of(config, record, step) for step in ended.failing),
        is_silent=catalogued(record.findings[0].code).erases_itself,
        repeats=record.search.repeats if record.search is not None else 1,
        captured=captured,
    )
    return prove(job, ended.run, ended.failing, without, observer, start)


def _materials(ended: Bisected) -> PlanInputs:
    """Return a plan's inputs, with the half tensors' names in editable functions, from a replay of the failing step."""
    pins, run, first = ended.record.pins, ended.run, ended.failing[0]
    model = run.workload.model
    lines = own_lines(run, ended.failing, pins)
    half = Manner(first.made.low.dtype, first.scale, is_lifted=False)
    edited = lines_that_may_be_edited(pins, lines, model) | {(one.file, one.line) for one in _constants(ended.record)}
    with weights_of(model, first), names_seen(edited) as names:
        replay_step(run, first.snapshot, half)
        costs = step_costs(run, first)
    # Prefer names seen in the replay. For lines that it does not run, use the names seen in the run.
    seen = {line: found for line, found in names.items() if found.half or found.full}
    return PlanInputs(model, pins, lines, {**run.names, **seen}, run.makings, costs)
