"""The remedy for a script with half weights: an edit, proven by short runs (windows) before and after it."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from ampdbg.diagnosis.diagnose import diagnose
from ampdbg.diagnosis.updates import (
    ACCUMULATION,
    FROZEN,
    MOST_OF_THE_UPDATE,
    SMALL_UPDATES,
    STUCK,
    TOO_FAR,
    why_no_edit,
)
from ampdbg.errors import ConfigError, ScriptError, named_error
from ampdbg.observer import Observer
from ampdbg.patch.file_edits import base_folder, file_diff
from ampdbg.patch.half_weights import HalfLines, WeightEdits, beta2_lowered, norms_in_float32, weights_in_float32
from ampdbg.precision.emulation import is_emulating
from ampdbg.probes import update_ledger
from ampdbg.probes.dtype_contract import OTHERS, kinds_in
from ampdbg.probes.half_weights import HalfWeights
from ampdbg.probes.tensors import HALVES
from ampdbg.probes.watch import Watch
from ampdbg.proof.jobs import overlaid
from ampdbg.proof.processes import Deliver, end_group, fresh_process
from ampdbg.proof.suggestion import Suggestion
from ampdbg.quantities import byte_size, counted, listed, number, percent
from ampdbg.record.codes import catalogued
from ampdbg.record.pins import Form, Handover, PatchUnit, Proof, ProofStep
from ampdbg.record.run import Record, Updates
from ampdbg.script.gpu import emulated_gpu
from ampdbg.script.guard import FileGuard
from ampdbg.script.launch import Script, ScriptEnd, Start, run_script
from ampdbg.script.ranks import alone
from ampdbg.script.restart import REFUSED
from ampdbg.source.ownership import loaded_files

MOST_LEFT = 0.5
"""A remedy cures half weights if at most this share of what they lose of the loss's fall is left."""

STEPS, LEAST, LONGEST = 60, 20, 120.0
"""A window has up to STEPS steps. After LONGEST seconds it ends, but with no fewer than LEAST steps."""


@dataclass(frozen=True)
class SeenWindow:
    """The results of a window; ``failure`` is the reason for an early end. ``elements`` counts the elements of trained
    half parameters by kind, and ``states`` the optimizer's states for each element."""

    record: Record
    lines: HalfLines = field(default_factory=HalfLines)
    elements: Mapping[str, int] = field(default_factory=dict)
    states: int = 0
    failure: str = ""


def train_a_window(
    start: Start, patched: Mapping[Path, bytes], most: int, observer: Observer, deliver: Deliver, folder: Path
) -> None:
    """Train up to ``most`` steps of a patched script in this process, which exits in the middle of the script."""
    began, seen = time.monotonic(), list[SeenWindow]()
    watch, notes = Watch(None, ()), HalfWeights()

    def end(failure: str = "") -> None:
        try:
            files.remove_new()
            record = replace(watch.record(), command="run")
            deliver(replace(seen[0] if seen else SeenWindow(record), record=record, failure=failure))
        finally:
            end_group(os.getpid())
            os._exit(0)

    def refuse(event: str, path: str) -> ScriptError:
        end(REFUSED.format(start.name, event, path, shlex.quote(f"{start.typed} --output elsewhere")))
        raise AssertionError("the process has ended")

    def step_ended(is_bad: bool) -> None:
        seen.append(seen[0] if seen else _seen(watch, notes))  # while the script holds its model
        if len(seen) >= most or (len(seen) >= LEAST and time.monotonic() - began > LONGEST):
            end()

    def script_ended(ended: ScriptEnd) -> None:
        end("" if ended.error is None else f"{start.name} raised {named_error(ended.error)}")

    files, watch.ended = FileGuard(folder, refuse), step_ended
    text = {os.path.realpath(path): text for path, text in patched.items()}.get(os.path.realpath(start.name))
    with (
        files.on(),
        alone(has_launcher=start.is_of_group),
        emulated_gpu() if start.emulate else contextlib.nullcontext(),
        overlaid(patched),
        patch.object(update_ledger, "SHARE", math.inf),  # measure without a time limit
        watch,
        notes,
    ):
        run_script(Script(start.name, start.arguments, start.is_module, text=text), script_ended)


def _seen(watch: Watch, notes: HalfWeights) -> SeenWindow:
    groups = [(optimizer, group["params"]) for optimizer in watch.optimizers for group in optimizer.param_groups]
    half = {one: optimizer.state[one] for optimizer, group in groups for one in group if one.dtype in HALVES}
    kinds = {parameter: kind for _, kind, parameter in kinds_in(watch.models)}
    elements: Counter[str] = Counter()
    for one in half:
        elements[kinds.get(one, OTHERS)] += one.numel()
    states = [sum(getattr(held, "shape", None) == one.shape for held in of.values()) for one, of in half.items()]
    device = "cuda" if is_emulating() else watch.optimizers.device.type
    seen, files = (notes.casts(half), notes.loop, notes.is_lowered, tuple(notes.outside)), tuple(loaded_files())
    lines = HalfLines(*seen, files, device)
    return SeenWindow(watch.record(), lines, dict(elements), max(states, default=0))


def _trained(start: Start, patched: Mapping[Path, bytes], most: int, observer: Observer, what: str) -> SeenWindow:
    observer.stage(f"{counted(most, 'step')} of {start.name} {what}")
    with fresh_process("output") as process:
        process.begin(train_a_window, start, patched, most)
        process.pass_on(observer)
        process.child.wait()
        seen: SeenWindow | None = process.result()
    if seen is None:
        raise ScriptError(f"{start.name}: its process ended before it was done")
    return replace(seen, record=diagnose(seen.record))


class Remedy(NamedTuple):
    """A cure for half weights. ``fits`` takes the codes found and the kinds of parameters that mostly lose updates.
    ``edit`` adds the edits. ``widens`` is true of the kinds that become float32."""

    title: str
    fits: Callable[[frozenset[str], frozenset[str]], bool]
    edit: Callable[[WeightEdits], None]
    widens: Callable[[str], bool]


NORMS = frozenset({"norms"})
LOSE_UPDATES = frozenset({FROZEN, SMALL_UPDATES})
"""Codes of lost updates, which a remedy must restore. Half weights with another fault lose some too, which may stay."""

REMEDIES = (
    Remedy(
        "norms in float32",
        lambda codes, kinds: codes == {FROZEN} and kinds == NORMS,
        norms_in_float32,
        NORMS.__contains__,
    ),
    Remedy("beta2 = 0.95", lambda codes, kinds: codes == {STUCK}, beta2_lowered, lambda kind: False),
    Remedy("weights in float32 under autocast", lambda codes, kinds: True, weights_in_float32, bool),
)
"""The remedies, cheapest first. The first with a passed proof is suggested."""

ALTERNATIVES = (
    ("torchao's AdamW8bit(..., bf16_stochastic_round=True)", -2),
    ("torchao's AdamW4bit(..., bf16_stochastic_round=True)", -3),
    ("torchao's AdamWFp8(..., bf16_stochastic_round=True)", -2),
    ('HF Trainer\'s optim="adamw_torch_8bit", optim_args="bf16_stochastic_round=True"', -2),
    ("torch-optimi's AdamW, which keeps what rounding loses (Kahan)", 2),
)
"""Optimizers for bfloat16 weights, with the difference in bytes per parameter from torch's AdamW."""


def _lost(seen: Updates) -> str:
    known = [one for one in seen.kinds if one.lost is not None]
    kinds = [f"{one.lost:.0%} ({one.kind})" for one in sorted(known, key=lambda one: -(one.lost or 0.0))]
    return f"{listed(kinds)} of the way lost" if kinds else "nothing lost" if seen.judged else "the rest not measured"


MEASURES: Mapping[str, Callable[[Updates], str]] = defaultdict(lambda: lambda seen: "found") | {
    FROZEN: lambda seen: f"{counted(len(seen.frozen or seen.still), 'parameter')} frozen, {_lost(seen)}",
    SMALL_UPDATES: lambda seen: f"{seen.times:.3g} times as far" if seen.times > TOO_FAR else _lost(seen),
    STUCK: lambda seen: f"second moments {max((one.times for one in seen.stuck), default=1.0):.3g} times apart",
    ACCUMULATION: lambda seen: f"sums {seen.lost_accumulation or 0.0:.0%} apart",
}
"""Texts of the ledger's measurements, compared with float32 masters, by code."""


NOTHING = "none lost, as the weights are float32 themselves"


def suggest_for_half_weights(
    known: Record, start: Start, form: Form, *, verify: bool, observer: Observer
) -> Suggestion:
    """Suggest an edit that cures the losses of half weights, proven by the script's first steps before and after it.

    ``known`` is the record of a run of the script.

    Raises:
        ConfigError: the form is one of pins.
        ScriptError: the script cannot be restarted, or ampdbg knows no line to edit.
    """
    if form in ("module", "yaml"):
        raise ConfigError(f"got --format {form}; no pin cures half weights; allowed: --format diff, --format json")
    if why_none := why_no_edit(known):
        raise ScriptError(f"{start.name}: no edit is known: {why_none}")
    codes = frozenset(finding.code for finding in known.faults if catalogued(finding.code).verdict == "precision")
    ledger = known.ledger
    losing = [one.kind for one in ledger.kinds if (one.lost or 0.0) > MOST_OF_THE_UPDATE]
    kinds = frozenset([*losing, *(one.kind for one in ledger.still)])
    most = max([STEPS, *(one.steps for one in ledger.stuck)])
    before = _trained(start, {}, most, observer, "as they are")
    if not before.lines.casts:
        what = f"its {' and '.join(known.half_weights)} weights" if known.half_weights else "averages in half"
        those = "them" if known.half_weights else "trained weights"
        why = before.failure or f"ampdbg saw no line of it that makes {those} so"
        raise ScriptError(f"{start.name}: no edit is known for {what}: {why}")
    fitting = [one for one in REMEDIES if one.fits(codes, kinds)]
    made = Suggestion(known)
    for remedy, edits in _edited(fitting, before.lines, start):
        files = edits.made()
        steps = [ProofStep("the patched script", True, before.failure, ran=False)] if before.failure else []
        by_hand = [*edits.refused, *edits.unlowered]
        if verify and not steps:
            patched = {one.path: one.after for one in files}
            after = _trained(start, patched, most, observer, f"with {remedy.title}")
            left = edits.by_hand(after.lines, are_half=bool(after.record.half_weights))
            by_hand = by_hand if after.failure else [*left]  # a failed run may not have reached autocast
            steps += _shown(codes, before, after)
        is_proven = all(step.passed for step in steps)
        folder, is_git = base_folder(files, Path.cwd())
        handed = Handover(
            form,
            folder=str(folder),
            is_git=is_git,
            files=tuple(file_diff(one, folder) for one in files),
            units=tuple(PatchUnit(title, ()) for title in (*edits.titles, *by_hand)),
            notes=(*(_cost(one, before) for one in fitting), *_alternatives(codes, before)),
        )
        proof = Proof(is_proven, tuple(steps)) if steps else None
        dtypes = known.dtypes or before.record.dtypes  # a capture has none
        shown = replace(known, command="suggest-fp32", dtypes=dtypes, handover=handed, verification=proof)
        made = Suggestion(shown, files if is_proven else ())
        if is_proven:
            break
    return made


def _edited(fitting: Iterable[Remedy], lines: HalfLines, start: Start) -> list[tuple[Remedy, WeightEdits]]:
    """Return the remedies that edit a file, with their edits."""
    tried = [(remedy, WeightEdits(lines)) for remedy in fitting]
    for remedy, edits in tried:
        remedy.edit(edits)
    made = [(remedy, edits) for remedy, edits in tried if edits.made()]
    if not made:
        told = listed([text for _, edits in tried[-1:] for text in (*edits.unlowered, *edits.refused)], 3)
        raise ScriptError(f"{start.name}: no edit is printed: {told}")
    return made


def _shown(codes: frozenset[str], before: SeenWindow, after: SeenWindow) -> Iterator[ProofStep]:
    """Yield the proof steps from the two windows."""
    old, new = before.record, after.record
    was, now = ({finding.code for finding in one.faults} for one in (old, new))
    found = (f"{one.code}: {one.message}" for one in new.faults if one.code not in was)
    steps, is_short = counted(new.steps_run, "step"), new.steps_run < min(old.steps_run, LEAST)
    wrong = after.failure or next(found, f"it ends after {steps}" * is_short)
    losses = " before, ".join(number(one.steps[-1].loss) for one in (old, new) if one.steps)
    seen = f"{steps} in a fresh process; the last loss is {losses} with the patch"
    yield ProofStep("the patched script", not wrong, wrong or seen)
    is_measured = new.ledger.judged > 0 or not new.half_weights
    unseen = f"the first {counted(old.steps_run, 'step')} before the patch do not show it; run the patched script again"
    for code in sorted(codes):
        lost = [MEASURES[code](one.ledger) if one.half_weights else NOTHING for one in (old, new)]
        shown = ProofStep(code, is_measured and code not in now, f"{lost[0]} before; {lost[1]} with the patch")
        yield shown if code in was else ProofStep(code, True, unseen, ran=False)
    cost, left = old.ledger.cost, new.ledger.cost if new.half_weights else 0.0
    if cost and codes & LOSE_UPDATES and left is not None:
        costs = f"{percent(cost)} before; {percent(left)} with the patch"
        yield ProofStep("lost of the loss's fall, to first order", left <= MOST_LEFT * cost, costs)


def _cost(remedy: Remedy, seen: SeenWindow) -> str:
    """Describe the memory cost: in float32, weight, gradient and states take two more bytes per element."""
    count = sum(size for kind, size in seen.elements.items() if remedy.widens(kind))
    return f"{remedy.title}: {byte_size((4 + 2 * seen.states) * count)} more"


def _alternatives(codes: frozenset[str], seen: SeenWindow) -> Iterator[str]:
    """Yield the optimizers that lose no updates of bfloat16 weights."""
    may_stay = codes <= LOSE_UPDATES and seen.record.half_weights == ("bfloat16",)
    for what, each in ALTERNATIVES if may_stay else ():
        size = byte_size(abs(each) * sum(seen.elements.values()))
        yield f"not proven here: bfloat16 weights with {what}: {size} {'more' if each > 0 else 'less'}"
