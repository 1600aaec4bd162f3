"""The page of a scan, and of a watched script: headline, findings, loss scale, non-finite tensors, captures."""

from __future__ import annotations

import math
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from pathlib import PurePath

from ampdbg.agreement import AGREEMENT, SAME_RUN, STEPS_BEFORE_COMPARISON, agrees_with_fp32, is_finite
from ampdbg.diagnosis.cause import KEPT_SCALE, WEIGHTS_GREW
from ampdbg.diagnosis.producers import UNKNOWN
from ampdbg.diagnosis.scale import UNEXPLAINED
from ampdbg.diagnosis.updates import why_no_edit
from ampdbg.formats import FLOAT32
from ampdbg.levels import format_of_config
from ampdbg.obstacles import obstacle_in
from ampdbg.quantities import counted, duration, in_module, listed, number, scale, share
from ampdbg.record.codes import FACTS, catalogued
from ampdbg.record.findings import Finding
from ampdbg.record.run import (
    EXITED,
    NOT_CAPTURED,
    GroupOverflow,
    Investigation,
    ParameterCounts,
    Record,
    ScriptRun,
    Step,
    TensorCounts,
)
from ampdbg.report.explanation import explanation

from . import view
from .view import line, lines, more, ran_on, with_option
from .weights import averages, contract, ledger, short_of, weights_in_brief

MAX_TENSORS = 8

MAX_OPTIMIZERS = 3
"""The most optimizers with their own numbers on the page: the most skipped optimizers."""

TONES: Mapping[str, view.Tone] = {"healthy": "good", "precision": "bad", "other": "bad", "inconclusive": "doubtful"}
"""The tone of a headline by the record's verdict."""

SEARCHES = ("bisect", "suggest-fp32")
"""Commands that also take a record or a module file, unlike a scan. The same command can be typed again."""

COUNTS = tuple(view.Column(heading, "number") for heading in ("steps", "first", "inf", "NaN"))
GROUP_COLUMNS = (view.Column("group"), *COUNTS, view.Column("worst share", "number"))
TENSOR_COLUMNS = (view.Column("tensor"), *COUNTS, view.Column("of", "number"), view.Column("at", "sign"))


def page(record: Record, typed: view.CommandContext) -> view.Page:
    """Return the page of a scan."""
    error, sound = raised(record), healthy_step_table(record)
    charted = record.scaled_steps * any(step.skipped or _is_lost(step, record) for step in record.scaled_steps)
    sections = view.filled(
        error,
        view.Findings(record.findings),
        view.ScaleChart("Loss scale", charted),
        group_table(record),
        _tensor_table(record),
        contract(record),
        ledger(record.ledger),
        averages(record.ledger),
        sound,
    )
    footer = [" · ".join(_facts(record)), *weights_in_brief(record, typed), *ran_on(record)]
    if record.command == "run" and record.captures:
        footer.append(f"Captured: {' '.join(_to_type(path, typed.folder) for path in record.captures)}")
    story = view.filled(error, view.Findings(record.findings, is_brief=True), sound)
    next_ = next_command(record, typed)
    return view.Page(headline(record), sections, tuple(footer), typed.record_path, next_, story)


def raised(record: Record) -> view.Paragraph:
    """Return the error that stopped the run, if one did."""
    obstacle = obstacle_in(record.error)
    said = (line(text, tone="bad", depth=min(at, 1)) for at, text in enumerate(record.error.splitlines()))
    return view.Paragraph((*said, *lines(obstacle.says if obstacle else "")))


def headline(record: Record) -> view.Headline:
    """Return one sentence from the first finding and the verdict; a run that was stopped says so first."""
    early, sentence = stopped(record), _sentence(record).removesuffix(".") + f"{unjudged(record)}."
    is_error = record.verdict == "inconclusive" and "error" in [one.severity for one in record.findings[:1]]
    return view.first(
        (early, view.Headline("warning", f"{early}. {sentence}".rstrip())),
        (is_error, view.Headline("bad", sentence)),
        (unjudged(record), view.Headline("doubtful", sentence)),
        (True, view.Headline(TONES[record.verdict], sentence)),
    )


def unjudged(record: Record) -> str:
    """Return what a healthy run did not compare with FP32; "" if it compared all. It may be half weights without
    masters, or every step of a script that trains in half."""
    seen = record.ledger
    many = f"{seen.unjudged:,} of {counted(seen.half, 'half parameter')}"
    updates = many if seen.judged else counted(seen.unjudged, "half parameter")
    weights = f"; the updates of {updates} were not compared with FP32"
    parts = {
        weights: record.verdict == "healthy" and seen.unjudged and not record.has_masters,
        "; no step was compared with FP32": is_uncompared(record),
    }
    return "".join(part for part, holds in parts.items() if holds)


def is_uncompared(record: Record) -> bool:
    """True if a script that trains in half looks healthy, and no step of any optimizer was compared with FP32."""
    is_half = record.environment.policy != "none" and format_of_config(record.config) is not FLOAT32
    is_script = record.command == "run" and record.verdict == "healthy"
    return is_script and is_half and all(made.why != "end" for made in record.investigations)


def stopped(record: Record) -> str:
    """Return what stopped the run, or the watching, before its end, and when; "" if nothing did."""
    done, planned = record.steps_run, record.planned_steps
    count = f"{done:,} of {counted(planned, 'step')}" if planned else counted(done, "step")
    searching = ", in the search that follows" * (done == planned and record.command in SEARCHES)
    return view.first(
        (record.unseen.since is not None, f"ampdbg itself failed after {counted(done, 'step')}, and stopped watching"),
        (record.error.startswith(EXITED), f"The script ended early after {count}{searching}"),
        (record.error, f"An error stopped the run after {count}{searching}"),
        (record.interrupted, f"Interrupted after {count}{searching}"),
        (True, ""),
    )


def _sentence(record: Record) -> str:
    for finding in record.findings[:1]:
        code = catalogued(finding.code)
        template = (code.information or "{verdict}: {skips}.") if finding.severity == "info" else code.headline
        template = template or f"{explanation(code.name).title}, at step {{step}}."
        return template.format(**_headline_facts(finding, record))
    in_fp32 = ", and no step that ampdbg examined ran in half precision" * (record.environment.policy == "none")
    return view.first(
        (record.steps, f"{_verdict(record)}: {_skips(record.timelines[0], record)}{in_fp32}."),
        (record.script, "ampdbg saw no optimizer step."),
        (True, "The run ended before its first step."),
    )


def _verdict(record: Record) -> str:
    """Return "Healthy"; "No fault found" if nothing in half was compared with FP32; or "Inconclusive" for a run that
    has not shown its health, such as one that skipped every step."""
    if record.verdict != "healthy":
        return "Inconclusive"
    return "No fault found" if unjudged(record) else "Healthy"


def _headline_facts(finding: Finding, record: Record) -> dict[str, str]:
    """Return the facts that a headline may name (:data:`ampdbg.record.codes.FACTS`)."""
    with_it = (one for one in record.timelines if any(step.step == finding.step for step in one.steps))
    timeline = next(with_it, record.timelines[0])  # if none has its step, the optimizer that was skipped most
    steps = timeline.scaled_steps
    facts = dict.fromkeys(FACTS, "") | {
        "step": str(finding.step),
        "phase": finding.phase,
        "skips": "no step ran",
        "verdict": _verdict(record),
        "cause": view.first(
            (finding.evidence.get("finite_in_fp32") is False, "FP32 fails too"),
            (finding.evidence.get("reproduced") == 0, "No replay of it fails"),
            (True, "The cause is unknown"),
        ),
        "where": in_module(finding.module),
    }
    if not steps:
        return facts
    first, last = scale(steps[0].scale), scale(steps[-1].scale)
    kept, settled = finding.evidence.get(KEPT_SCALE), finding.evidence.get("scale")
    is_normal = record.verdict == "healthy" and not finding.evidence.get(UNEXPLAINED)
    normal = ", which is normal" * is_normal
    return facts | {
        "skips": _skips(timeline, record),
        "losses": _losses(finding, timeline, record),
        "first": first,
        "last": scale(kept) if isinstance(kept, float) else last,
        "falling": f", and the loss scale fell from {first} to {last}" * (steps[-1].scale < steps[0].scale),
        "settles": f"settled at {scale(settled)}{normal}"
        if isinstance(settled, float)
        else "settles; it has not settled yet",
    }


def _skips(timeline: Record, record: Record) -> str:
    if not timeline.steps_skipped:
        repaired = sum(step.repaired for step in record.steps)
        return f"none of {_ran(record)} skipped" + f", and {repaired:,} repaired by the script" * (repaired > 0)
    return f"{timeline.steps_skipped:,} of {counted(timeline.steps_run, 'step')}{record.whose(timeline)} skipped"


def _ran(record: Record) -> str:
    """Return how long the loop ran: in steps, or in iterations if several optimizers take turns."""
    return counted(record.steps_run, "iteration" if record.timelines[1:] else "step")


def _how_it_ends(record: Record) -> str:
    """Return what ended the run in its last step; "" if it ended normally."""
    by_script = f"the script ends with exit code {record.exit_code}" * bool(record.exit_code)
    return "an error ends the run" if record.error else by_script


def is_own_loss(step: Step, record: Record) -> bool:
    """True if the step computed its loss itself; if it ended before that, a replay of its modules supplied one.

    In the middle of a run the loop itself computed a loss from the module outputs.
    """
    is_last = step.step == record.steps[-1].step and bool(_how_it_ends(record))
    is_replayed = record.command != "run" or is_last
    return not is_replayed or all(made.reach != "modules" for made in record.investigations if made.step == step.step)


def _is_lost(step: Step, record: Record) -> bool:
    return not math.isfinite(step.loss) and is_own_loss(step, record)


def _losses(finding: Finding, timeline: Record, record: Record) -> str:
    """Return the loss of the step, and how many losses of its optimizer are not finite."""
    bad = [step for step in timeline.steps if _is_lost(step, record)]
    here = next((step for step in timeline.steps if step.step == finding.step and not math.isfinite(step.loss)), None)
    if here is None:
        return ""
    lost = len({here.step, *(step.step for step in bad)}) + record.left_out.lost
    ends, is_last = _how_it_ends(record), here is record.steps[-1]
    every = counted(timeline.steps_run, "loss") + record.whose(timeline)
    many = f"; {lost:,} of {every} are not finite" * (lost > 1)
    return view.first(
        (lost == 1 and is_last and ends, f", where {ends}"),
        (here in bad, f", where the loss is {number(here.loss)}{many}"),
        (True, ""),
    )


MAX_GROUPS = 12

FEW_GROUPS = 4

AMONG = ", among the {:,} recorded steps"


def group_table(record: Record) -> view.Table:
    """Return the groups with non-finite gradients, with the step that hit fewest above, and steps that hit all below.

    A step that hits (almost) every group does not show where the fault is, so its groups are not listed. A row counts
    the elements of the group's worst step. The rows are sorted by first step, then by how often, then by their order in
    the model.
    """
    hit = [step for step in record.steps if _hit(step)]
    total = max(len(record.groups), max(map(_hit, hit), default=0))
    untrained = set(record.unseen.parameters_without_gradient)
    reachable = total - sum(name in untrained for name in record.groups)
    # A model with few groups always has them named one by one.
    nearly_all = reachable - total // 10 if total > FEW_GROUPS else math.inf
    listing = [step for step in hit if 0 < len(step.groups) < nearly_all]
    everywhere = [step for step in hit if _hit(step) >= nearly_all]
    events: dict[int, list[tuple[int, GroupOverflow]]] = {}
    for step in listing:
        for group in step.groups:
            events.setdefault(group.index, []).append((step.step, group))
    groups = sorted(events.values(), key=lambda of_group: (of_group[0][0], -len(of_group), of_group[0][1].index))
    steps = len({step.iteration for step in hit})
    return view.Table(
        f"Non-finite gradients, in {steps:,} of {_ran(record)}"
        f"{AMONG.format(len(record.steps)) * bool(record.left_out.unhealthy)}",
        GROUP_COLUMNS * bool(groups),
        tuple(_group_row(of_group, len(listing)) for of_group in groups[:MAX_GROUPS]),
        tuple(_narrowest(listing, len(groups), total)),
        (*more(len(groups) - MAX_GROUPS, "group"), *_everywhere(everywhere, total)),
    )


def _hit(step: Step) -> int:
    """Return how many groups had a non-finite gradient in this step, listed or not."""
    return len(step.groups) or step.groups_hit


def _narrowest(listing: Sequence[Step], groups: int, total: int) -> Iterator[view.StyledLine]:
    """Yield the step that localizes best: a step with few groups is near the cause, one with many comes after it."""
    for step in sorted(listing, key=lambda step: len(step.groups))[:1]:
        if len(step.groups) < min(MAX_GROUPS, groups):
            names = listed([group.name for group in step.groups])
            start = f"Step {step.step} affects the fewest groups, {len(step.groups)} of {total:,}: "
            yield line(start, view.Words(names, "strong"))


def _group_row(events: Sequence[tuple[int, GroupOverflow]], listing: int) -> tuple[str, ...]:
    """Return the row of a group: its worst parameter if that has another name, and its share of ``listing`` steps."""
    first, group = events[0]
    parameters = max((event.parameters for _, event in events), key=_bad_share)
    worst = max(parameters, key=lambda one: _bad_share((one,)), default=None)
    named = f" (worst: {worst.name})" if worst is not None and worst.name not in ("", group.name) else ""
    inf, nan = sum(one.inf for one in parameters), sum(one.nan for one in parameters)
    counts = (f"{len(events):,} of {listing:,}", str(first), f"{inf:,}", f"{nan:,}")
    return (f"{group.name}{named}", *counts, share(inf + nan, sum(one.size for one in parameters)))


def _bad_share(parameters: Sequence[ParameterCounts]) -> float:
    size = sum(one.size for one in parameters)
    return sum(one.inf + one.nan for one in parameters) / size if size else 0.0


def _everywhere(steps: Sequence[Step], total: int) -> Iterator[view.StyledLine]:
    if steps:
        which = "All" if all(_hit(step) == total for step in steps) else "Nearly all of"
        when = f"at once in {counted(len(steps), 'step')}, first at step {steps[0].step}"
        lost = sum(not math.isfinite(step.loss) for step in steps)
        losses = view.first(
            (not lost, ""),
            (lost == len(steps), "; the loss of each is non-finite too"),
            (True, f"; in {lost} of them the loss is too"),
        )
        yield line(f"{which} {total:,} groups {when}{losses}.")


def _tensor_table(record: Record) -> view.Table:
    """Return each tensor once, the earliest first, with its counts in the first step that shows it."""
    tensors: dict[tuple[str, str], list[tuple[int, TensorCounts]]] = {}
    for at, step in enumerate(record.steps):
        for counts in step.nonfinite:
            # Infinities that a buffer or a frozen parameter had before the first step: masks have them.
            may_be_mask = counts.kind == "buffer" or counts.frozen
            if not (may_be_mask and at == 0 and counts.when == "before" and not counts.nan):
                tensors.setdefault((counts.kind, counts.name), []).append((step.step, counts))
    rows: list[tuple[str, ...]] = []
    for (kind, name), shown in tensors.items():
        first, counts = shown[0]
        sample = f"sample {counts.first_index[0]}, " if counts.first_index and kind == "batch" else ""
        where = f"{sample}[{', '.join(map(str, counts.first_index))}]" * bool(counts.first_index)
        numbers = (f"{count:,}" for count in (counts.inf, counts.nan, counts.size))
        rows.append((f"{kind} {name}".rstrip(), f"{len(shown):,}", f"{counts.when} {first}", *numbers, where))
    seen = AMONG.format(len(record.steps)) * (len(record.steps) != record.steps_run)
    title = f"Non-finite tensors, before or after a step{seen}"
    return view.Table(title, TENSOR_COLUMNS, tuple(rows[:MAX_TENSORS]), below=more(len(rows) - MAX_TENSORS))


def _facts(record: Record) -> Iterator[str]:
    several = record.timelines[1:]
    yield _ran(record)
    for timeline in sorted(
        record.timelines[:MAX_OPTIMIZERS], key=lambda one: [step.optimizer for step in one.steps[:1]]
    ):
        facts = list(_facts_of(timeline, record))
        yield from [f"optimizer {timeline.steps[0].optimizer}: {', '.join(facts)}"] if several else facts
    yield from filter(None, [_why_uncompared(record)] * is_uncompared(record))
    yield duration(record.elapsed)


def _why_uncompared(record: Record) -> str:
    """Return why no step was compared with FP32, if no note says it."""
    by_health = (group for one in record.timelines for group in groupby(one.steps, attrgetter("is_healthy")))
    rows = [len(list(row)) for is_healthy, row in by_health if is_healthy]
    return view.first(
        (any("was not compared with FP32" in note for note in record.unseen.notes), ""),
        (
            max(rows, default=0) <= STEPS_BEFORE_COMPARISON,
            f"a comparison with FP32 takes over {STEPS_BEFORE_COMPARISON} healthy steps in a row",
        ),
        (True, "ampdbg could replay none of the steps that a comparison with FP32 takes"),
    )


def _distance(made: Investigation) -> str:
    low, fp32, distance = made.low, made.reference, made.low.gradient_distance
    if distance is None or distance <= AGREEMENT:
        loss_apart = abs(low.loss - fp32.loss) / abs(fp32.loss) if fp32.loss else 0.0
        is_near_zero = loss_apart > AGREEMENT  # as with advantages that sum to 0: a share of the loss shows nothing
        of_loss = SAME_RUN < loss_apart <= AGREEMENT, f"loss {share(loss_apart)}"
        apart = list(view.every(of_loss, (distance, f"gradients {share(distance or 0.0)}")))
        losses = f"; its loss is {number(low.loss)}, and {number(fp32.loss)} in FP32" * is_near_zero
        return f"step {made.step} agrees with FP32" + (f" ({' and '.join(apart)} apart{losses})" if apart else "")
    by_rounding = ", which rounding explains" * (made.floor is not None)
    why = ", where half precision picks other elements, as by an index or a mask" if made.choice else by_rounding
    return f"the gradients of step {made.step} differ from FP32's by {share(distance)}{why}"


def _facts_of(timeline: Record, record: Record) -> Iterator[str]:
    """Yield the facts about the steps of one optimizer."""
    if timeline.steps:
        last, scaled = timeline.steps[-1], timeline.scaled_steps
        yield f"{timeline.steps_skipped:,} skipped"
        with_loss = [step for step in timeline.steps if is_own_loss(step, record)]
        if any(step.loss for step in with_loss):  # an optimizer that steps on another's losses has none
            one, other = with_loss[0], with_loss[-1]
            sums = f" (summed over {counted(one.passes, 'backward pass')}, later over {other.passes:,})" * (
                one.passes != other.passes and math.isfinite(other.loss)
            )
            yield f"loss {_change(number(one.loss), number(other.loss))}{sums}"
        if last.grad_norm is not None:
            yield f"gradient norm {number(last.grad_norm)}"
        ended_first = record.exit_code != 0 and len(record.steps) == 1  # maybe before a scaler could scale its loss
        if last.scaler or (with_loss and not ended_first):
            yield _loss_scale(timeline, scaled)
        healthy = (made for made in timeline.investigations if agrees_with_fp32(made) or made.choice)
        yield from map(_distance, healthy)


def _loss_scale(timeline: Record, scaled: Sequence[Step]) -> str:
    """Return the loss scale; if no scaler is used, the script's own loss scale."""
    if timeline.script is None or any(step.scaler for step in scaled):
        return f"loss scale {_change(scale(scaled[0].scale), scale(scaled[-1].scale))}"
    is_own = any(step.scale != 1.0 for step in scaled)
    own = [step.scale for step in scaled] if is_own else [made.low.scale for made in timeline.investigations]
    if any(one > 1.0 for one in own):
        return f"the script's own loss scale {_change(scale(own[0]), scale(own[-1]))}"
    return "no scaler used"


def _change(first: str, last: str) -> str:
    return first if first == last else f"{first} to {last}"


def next_command(record: Record, typed: view.CommandContext) -> view.NextCommand | None:
    """Return what to type next: a longer run, a rerun, a search for pins, the counts, or the same run in FP32."""
    if record.script is not None:
        return _after_script(record, record.script, typed)
    again = f"ampdbg {record.command if record.command in SEARCHES else 'scan'} {typed.config}"
    longer = with_option(again, "--steps", 10 * max(record.planned_steps, 1))
    fp32 = with_option(again, "--set", "precision.level=O0")
    is_cured, is_fp32 = pin_may_help(record), format_of_config(record.config) is FLOAT32
    has_counts = is_fp32 or (record.verdict == "other" and any(step.nonfinite for step in record.steps))
    is_long_enough = record.verdict != "healthy" and not only_settles(record)
    return view.next_of(
        (record.error and not is_cured, REPAIRED, again),
        (not is_long_enough, "run more steps", longer),
        (has_counts and not typed.record_path, "", ""),
        (has_counts, "read every count of every step", f"ampdbg report {typed.record_path} --format json"),
        (is_cured, "find the fewest modules that need FP32, by experiment", f"ampdbg bisect {typed.config}"),
        (record.verdict in ("other", "precision"), REPAIRED, again),
        (True, "run the same in FP32; if that fails too, precision is not the cause", fp32),
    )


REPAIRED = "rerun once this is repaired"

REPLAY_COLUMNS = (
    view.Column("precision"),
    view.Column("loss", "number"),
    view.Column("gradient norm", "number"),
    view.Column("gradients off by", "number"),
)


def healthy_step_table(record: Record) -> view.Table:
    """Return a table of a step that did not fail, in each precision, if no finding shows it. The step was captured, or
    could not be compared because it raises an error in one precision."""
    made = next((made for made in record.investigations if made.why == "end"), None)
    rows, errors = [], []
    for replay in made.replays if made else ():
        of_weights = " on rounded weights" * replay.rounded  # the noise floor
        condition = of_weights if replay.dtype == "float32" else f", loss scale {scale(replay.scale)}"
        precision = f"{short_of(replay.dtype)}{condition}"
        distance = "" if replay.gradient_distance is None else share(replay.gradient_distance)
        numbers = (number(replay.loss), number(replay.grad_norm))
        if replay.error:
            numbers = ("raises", "-")
            errors.append(line(f"in {precision} {replay.error}", tone="doubtful"))
        rows.append((precision, *numbers, distance))
    if made is None or not (record.command == "replay" or errors):
        return view.Table("", (), ())
    return view.Table(f"Step {made.step}, replayed", REPLAY_COLUMNS, tuple(rows), below=tuple(errors))


def pin_may_help(record: Record) -> bool:
    """True if FP32 cures the first finding."""
    return record.verdict == "precision" and any(catalogued(one.code).pin_helps for one in record.findings[:1])


def may_be_tried(record: Record) -> bool:
    """True if FP32 is finite in the first finding's whole step, though no op explains why half is not."""
    root = record.faults[0] if record.faults else None
    if root is None or root.code != UNKNOWN or WEIGHTS_GREW in root.evidence:
        return False
    made = (one for one in record.investigations if one.step == root.replayed_step and one.reproduced)
    return any(one.reach == "whole" and is_finite(one.fp32) for one in made)


def only_settles(record: Record) -> bool:
    """True if nothing is wrong, but no step was taken yet: a longer run shows more."""
    return record.took_no_step and all(finding.severity == "info" for finding in record.findings)


def _after_script(record: Record, script: ScriptRun, typed: view.CommandContext) -> view.NextCommand | None:
    """Return what to type: a run with an emulated GPU, a command for a capture, or one that explains the finding."""
    obstacle, captures = obstacle_in(record.error), record.captures
    install = obstacle.install if obstacle else ""
    has_no_gpu = not record.environment.emulated and record.environment.device == "cpu"
    is_cured = pin_may_help(record)
    of_root = _of_root(captures, record) if is_cured or may_be_tried(record) else ""
    is_of_capture = record.command == "replay" and "--script" in typed.config
    taken = typed.config if is_of_capture else _capture_to_type(of_root, script, typed.folder)
    prove = "make the patch that cures it, proven on the captured step"
    search = "find what needs FP32 by experiment, on the captured step"
    first = _capture_to_type("".join(captures[:1]), script, typed.folder)
    is_half = record.verdict == "precision" and record.half_weights and record.updates
    is_edited = is_half and typed.record_path and not why_no_edit(record)
    is_replayed = not captures or record.command != "run" or record.investigations
    codes = [
        catalogued(one.code).name
        for one in record.findings[:1]
        if record.verdict != "healthy" and not only_settles(record)
    ]
    suggest, find = "ampdbg suggest-fp32", prove if is_cured else search
    # No step ran in half precision, which may be why nothing else was found.
    is_fp32 = record.environment.policy == "none" and (not record.findings or record.verdict == "inconclusive")
    needs_gpu = has_no_gpu and (obstacle or is_fp32)
    was_refused = any(NOT_CAPTURED in note for note in record.unseen.notes)
    can_be_captured = not (captures or script.processes > 1 or was_refused)
    again = script.again(record.environment, record.last_failing_step)
    sound = min(STEPS_BEFORE_COMPARISON, record.steps_run - 1)
    emulated = f"ampdbg run --emulate {'-m ' * script.is_module}{typed.config}"
    return view.next_of(
        (install, "install it beside ampdbg", install),
        (needs_gpu, "run it in FP16, on an emulated GPU", emulated),
        (of_root, find, f"{suggest} {taken}"),
        (
            is_edited,
            "the edit that cures it, where ampdbg knows one, proven by a short run",
            f"{suggest} {typed.record_path}",
        ),
        (is_cured and can_be_captured, "capture a failing step, for a patch that cures it", again),
        (not is_replayed, "replay the captured step, also in FP32", f"ampdbg replay {first}"),
        (codes, "read what it means, and what cures it", f"ampdbg explain {''.join(codes)}"),
        (
            is_uncompared(record) and can_be_captured and sound > 0,
            "capture a step, which ampdbg replay compares with FP32",
            script.again(record.environment, sound),
        ),
    )


def _of_root(captures: Sequence[str], record: Record) -> str:
    """Return the capture of the first finding's step, or the first after it; an earlier capture has another fault."""
    root = record.findings[0]
    steps = {int(found[1]): path for path in captures if (found := re.search(r"-step-(\d+)\.[a-z]+$", path))}
    later = (path for step, path in sorted(steps.items()) if step >= root.step)
    return steps.get(root.replayed_step) or next(later, "")


def _capture_to_type(path: str, script: ScriptRun, folder: str) -> str:
    """Return a capture to type, with its script if that is outside of the folder: the capture cannot find it there."""
    typed, at = _to_type(path, folder), PurePath(os.path.normpath(os.path.join(folder, script.name)))
    if script.is_module or not folder or at.is_relative_to(folder):
        return typed
    return f"{typed} --script {shlex.quote(shlex.join([script.name, *script.arguments]))}"


def _to_type(path: str, folder: str) -> str:
    """Return a path quoted for a shell, relative to the folder if it is below it."""
    below = PurePath(path)
    return shlex.quote(str(below.relative_to(folder) if folder and below.is_relative_to(folder) else below))
