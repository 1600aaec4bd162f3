"""The whole way from a config to a proven patch: search the pins, plan the edits, prove them, or say why not."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ampdbg.config import Config
from ampdbg.diagnosis.remedies import other_remedies
from ampdbg.errors import WorkloadError
from ampdbg.observer import UNOBSERVED, Observer
from ampdbg.patch.by_name.helper import MODULE_NAME, module_text
from ampdbg.patch.own_lines import own_lines
from ampdbg.patch.placements import lines_that_may_be_edited
from ampdbg.patch.plan import WAYS, FileEdit, Materials, Patch, layers_of_one_tensor, planned, wider_than
from ampdbg.patch.source_pins import Refused
from ampdbg.pinning.bisection import Bisected, bisected
from ampdbg.pinning.pin_search import scales_of
from ampdbg.pinning.pin_set import digest, tied_together
from ampdbg.probes.half_names import names_seen
from ampdbg.proof.jobs import Job, Patched
from ampdbg.proof.proof import prove
from ampdbg.record.codes import CODES
from ampdbg.record.pins import EVERYTHING, Form, Proof, Strategy
from ampdbg.record.run import Record
from ampdbg.replay.replay import Manner, replay_step
from ampdbg.replay.snapshot import weights_of

PROVEN_STEPS = 200
"""The patched run is trained for so many steps, or to a little beyond the failing step."""

BEYOND = 20


Prover = Callable[[Patched, Mapping[str, Patched]], Proof]
"""Proves a patch, of which parts can be left out: the patch without each of them, by its title."""


@dataclass(frozen=True)
class Suggestion:
    """What there is to suggest.

    ``patch`` is None where there is nothing to suggest, where no code of the user's can be edited, or where the proof
    failed; the record's ``search`` and ``verification`` say which. ``names`` are the pins as the config takes them;
    ``one_tensor`` are those of them that are plain layers. ``notes`` are remedies other than pins. ``refused`` says
    why no code could be edited: ``FILE:LINES: reason`` each.
    """

    record: Record
    patch: Patch | None = None
    names: tuple[str, ...] = ()
    one_tensor: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()

    @property
    def is_by_name(self) -> bool:
        """Whether names say it all: a line of the step function or the loss has none."""
        return bool(self.names) and all(pin.source is None for pin in self.record.pins)

    def pins_file(self, names: Sequence[str]) -> str:
        """The file that pins those of ``names``."""
        return module_text(names, one_tensor=self.one_tensor)


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
        config: a checked config.
        form: what is to be suggested.
        verify: prove it in fresh processes.
        known: a record of this config: files that have changed since are refused.

    The other arguments are those of :func:`~ampdbg.pinning.bisection.bisect_run`.

    Returns:
        The suggestion. After an interrupt its record is ``interrupted`` and it has no patch; a search that had ended
        by then stands.

    Raises:
        WorkloadError: a target cannot be used, or a file is not what it was when ``known`` was made.
        UserCodeError: the user's code raised, and would have raised in FP32 too.
    """
    _refuse_stale(known)
    found: Suggestion | None = None
    try:
        with bisected(config, strategy, max_trials, observer) as searched:
            ended = replace(searched, record=replace(searched.record, command="suggest-fp32"))
            found = _without_patch(ended)
            if ended.record.interrupted or not ended.record.pins:
                return found
            prover = functools.partial(_proof, ended, observer) if verify else None
            if form in ("module", "yaml"):
                return _by_name(found, ended, form, prover) if prover and found.is_by_name else found
            observer.stage("planning the patch")
            return _with_patch(found, _materials(ended), prover)
    except KeyboardInterrupt:  # while the patch was planned or proven: what the search has found stands
        if found is None:
            raise
        return replace(found, record=replace(found.record, interrupted=True))


def _without_patch(ended: Bisected) -> Suggestion:
    model = ended.run.workload.model
    names = tuple(pin.name for pin in ended.record.pins if pin.source is None)
    one_tensor = layers_of_one_tensor(names, model)
    return Suggestion(ended.record, names=names, one_tensor=one_tensor, notes=other_remedies(ended.record))


def _with_patch(found: Suggestion, materials: Materials, prover: Prover | None) -> Suggestion:
    """The narrowest patch that holds; a wider one is tried where a narrower does not.

    What is only tied to a module that goes wrong is left as it is first.
    """
    failed: list[tuple[Patch, Proof]] = []
    refused: tuple[str, ...] = ()
    needed = replace(materials, pins=tuple(pin for pin in materials.pins if pin.sites or not pin.tied))
    plans = [(needed, ways) for ways in WAYS] if needed.pins else []
    plans += [(materials, ways) for ways in WAYS] if needed != materials else []
    for given, ways in plans:
        patch = planned(given, ways)
        refused = refused or tuple(_reasons(patch.refused))
        if not patch.edits or patch.refused or any(patch.edits == other.edits for other, _ in failed):
            continue
        if prover is None:
            return replace(found, patch=patch)
        proof = prover(_patched(patch.edits), {title: _patched(edits) for title, edits in patch.without.items()})
        if proof.passed:
            for narrower, why in failed:
                patch = wider_than(narrower, why.failure, patch)
            return replace(found, patch=patch, record=replace(found.record, verification=proof))
        failed.append((patch, proof))
    record = replace(found.record, verification=failed[0][1] if failed else None)
    return replace(found, record=record, refused=refused)


def _reasons(refused: Sequence[Refused]) -> Iterator[str]:
    """Each reason once for each file, with its lines."""
    lines: dict[tuple[str, str], list[int]] = {}
    for one in refused:
        lines.setdefault((one.file, one.reason), []).append(one.line)
    for (file, reason), numbers in lines.items():
        known = ", ".join(str(number) for number in dict.fromkeys(numbers) if number)
        place = f"{file}:{known}" if known else file
        yield f"{place}: {reason}" if place else reason


def _by_name(found: Suggestion, ended: Bisected, form: Form, prover: Prover) -> Suggestion:
    """The pins by name, proven in the form that they are handed over in."""
    file = ended.run.config.folder / f"{MODULE_NAME}.py"

    def patched(names: Sequence[str]) -> Patched:
        if form == "yaml":
            return Patched(pins=tuple(name or EVERYTHING for name in names))
        return Patched({file: found.pins_file(names).encode()}, pins_file=file) if names else Patched()

    parts = tied_together(found.names, ended.run.workload.model)
    without = {" and ".join(part): patched([name for name in found.names if name not in part]) for part in parts}
    return replace(found, record=replace(found.record, verification=prover(patched(found.names), without)))


def _patched(edits: Sequence[FileEdit]) -> Patched:
    return Patched({edit.path: edit.after for edit in edits})


def _proof(ended: Bisected, observer: Observer, patched: Patched, without: Mapping[str, Patched]) -> Proof:
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
    )
    return prove(job, ended.failing, without, observer)


def _materials(ended: Bisected) -> Materials:
    """What a plan needs, and what holds half tensors in the functions that may be edited, as the failing step runs."""
    pins, run, first = ended.record.pins, ended.run, ended.failing[0]
    model = run.workload.model
    lines = own_lines(run, ended.failing, pins)
    half = Manner(first.made.replays[0].dtype, first.scale, is_lifted=False)
    with weights_of(model, first), names_seen(lines_that_may_be_edited(pins, lines, model)) as names:
        replay_step(run, first.snapshot, half)
    return Materials(run.config, model, pins, lines, names)


def _refuse_stale(known: Record | None) -> None:
    """Lines of a file that has changed are not the lines that failed."""
    for file, before in (known.search.sources if known is not None and known.search is not None else {}).items():
        if digest(file) != before:
            raise WorkloadError(
                f"{file} has changed since the record was made: its line numbers may not be what they were; "
                f"give the config in place of the record, and all is run again"
            )
