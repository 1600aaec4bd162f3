"""The page of a comparison of levels: how each trains, the memory of a step, and the largest batch that fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ampdbg.agreement import FP32_ROUNDING, NOISE_FLOORS
from ampdbg.quantities import byte_size, counted, duration, in_module, number, percent, share
from ampdbg.record.codes import catalogued
from ampdbg.record.run import BatchFit, Costs, LevelCost, Record, StepMemory

from . import view
from .view import line, lines, ran_on, with_option

Columns = Sequence[tuple[view.Column, Callable[[LevelCost, Costs], view.Cell]]]
"""The columns of a table after the level's name, each with the function that returns its cell for a level."""

BAR_WIDTH = 40
HELD, KEPT = "━", "─"

NO_MEMORY = StepMemory(0, 0, 0, 0, 0, 0)

LOSSES = (
    "From FP32: the median difference between the losses, over the last quarter of the steps. Noise: the same "
    f"between FP32 and FP32 started from rounded weights. * marks more than {NOISE_FLOORS:.0f} times the noise, "
    f"and more than {percent(FP32_ROUNDING)}."
)
BEYOND_NOISE = "From FP32: the difference between the losses; * exceeds FP32's own noise."
HALF_FLOPS = "Half FLOPs: the share of products, convolutions and attention that tensor cores could compute."
BARS = f"{HELD} parameters, masters, gradients, optimizer   {KEPT} kept for the backward pass"
CASTS = "Casts: copies of weights that autocast keeps. Casts and activations are of one micro-batch."


def page(record: Record, typed: view.CommandContext) -> view.Page:
    """Return the page of ``ampdbg cost``; its story has a line for each level: its verdict and its cost."""
    costs = record.costs or Costs()
    levels = [one for one in costs.levels if one.memory is not None]
    errors = [f"{one.name} could not run: {one.error}" for one in costs.levels if one.error]
    is_timed, has_budget = any(one.seconds is not None for one in costs.levels), costs.budget is not None
    sections = view.filled(
        _table("Training", _TRAINING, costs.levels, costs, *errors, LOSSES, HALF_FLOPS),
        _table("Memory of a step", _BARS, levels, costs, *[BARS] * bool(levels)),
        _table("", _PARTS, levels, costs, *[CASTS] * bool(levels)),
        _table("On this GPU", _ON_GPU, levels * is_timed, costs),
        _table(f"The largest batch in {_size(costs)}, by doubling", _FIT, levels * has_budget, costs),
    )
    in_brief: Columns = (
        (view.Column("does it train?"), _trained),
        (view.Column("from FP32", "number", is_spare=True), _apart),
        (view.Column("memory", "number"), lambda one, costs: _bytes(_total(one))),
        (view.Column("of FP32", "number"), _memory_of_fp32),
        *[(view.Column("speed", "number"), _speed)] * is_timed,
        *[(view.Column(f"batch in {_size(costs)}", "number"), _batch)] * bool(costs.budget),
    )
    notes = [BEYOND_NOISE] * any("*" in _apart(one, costs) for one in costs.levels)
    story = _table("The levels", in_brief, costs.levels, costs, *errors, *notes)
    facts = f"{counted(record.planned_steps, 'step')} a level · {duration(record.elapsed)}"
    footer = (facts, *ran_on(record), *(f"Note: {note}" for note in costs.notes))
    next_ = _next_command(costs.levels, typed)
    return view.Page(_headline(record, costs), sections, footer, typed.record_path, next_, (story,))


def _headline(record: Record, costs: Costs) -> view.Headline:
    lower = [one for one in costs.levels if one.level != "O0" and one.trains and one.memory is not None]
    best, of_fp32 = min(lower, key=_total, default=_fp32(costs)), _total(_fp32(costs))
    ratio, speed_ratio = _of(_total(best), of_fp32), _speed(best, costs)
    is_timed, is_compared = speed_ratio != "-", ratio != "-"
    speed = f", at {speed_ratio} times its speed" * is_timed
    saves = is_compared and float(ratio) < 1.0
    memory = view.first(
        (saves, f" in {ratio} of FP32's memory"),
        (of_fp32, ", but in no less memory than FP32"),
        (True, ""),
    )
    none = f"No level below FP32 finishes {counted(record.planned_steps, 'step')} without a finding."
    is_gain = saves or not of_fp32 or (is_timed and float(speed_ratio) > 1.0)
    return view.first(
        (record.interrupted, view.Headline("warning", f"Interrupted after {counted(len(costs.levels), 'level')}.")),
        (not lower, view.Headline("bad", none)),
        (True, view.Headline("good" if is_gain else "doubtful", f"{best.name} trains{memory}{speed}.")),
    )


def _size(costs: Costs) -> str:
    budget = costs.budget or 0
    return f"{budget / 2**30:.4g} GiB" if budget % 2**20 == 0 else byte_size(budget)


def _table(title: str, columns: Columns, levels: Sequence[LevelCost], costs: Costs, *below: str) -> view.Table:
    heads = (view.Column("level", "sign"), *(column for column, _ in columns))
    rows = tuple((line(one.name), *(shown(one, costs) for _, shown in columns)) for one in levels)
    return view.Table(title, heads, rows, below=lines(*below, tone="faint"))


def _trained(one: LevelCost, costs: Costs) -> view.Cell:
    skipped = f"; {one.skipped:,} of {counted(one.steps, 'step')} skipped" * bool(one.skipped)
    finding = one.finding
    is_sure = finding is not None and finding.severity == "error" and one.verdict != "inconclusive"
    found = f"{finding.code}{in_module(finding.module)}" if finding else "not known"
    return view.first(
        (one.error, line(view.Words("✗ ", "bad"), "could not run")),
        (one.trains, line(view.Words("✓ ", "good"), f"yes{skipped}")),
        (is_sure, line(view.Words("✗ ", "bad"), f"{found}{skipped}")),
        (True, line(view.Words("? ", "doubtful"), f"{found}{skipped}")),
    )


def _apart(one: LevelCost, costs: Costs) -> str:
    if one.apart is None:
        return "-"
    is_noise = one.apart <= max(FP32_ROUNDING, NOISE_FLOORS * (one.noise or 0.0))
    return percent(one.apart) + ("" if is_noise else "*")


def _fp32(costs: Costs) -> LevelCost:
    """Return the FP32 level, the base of the comparison; an empty level if it is missing."""
    return next((one for one in costs.levels if one.level == "O0"), LevelCost("", "", ""))


def _total(one: LevelCost) -> int:
    return (one.memory or NO_MEMORY).total


def _bytes(size: int | None) -> str:
    return byte_size(size) if size else "-"


def _of(size: float | None, fp32: float | None) -> str:
    return f"{size / fp32:.2f}" if size and fp32 else "-"


def _memory_of_fp32(one: LevelCost, costs: Costs) -> str:
    return _of(_total(one), _total(_fp32(costs)))


def _speed(one: LevelCost, costs: Costs) -> str:
    return _of(_fp32(costs).seconds, one.seconds)


def _bar(one: LevelCost, costs: Costs) -> view.Cell:
    most = max(map(_total, costs.levels)) or 1
    ends = [round(BAR_WIDTH * size / most) for size in (_total(one) - (one.memory or NO_MEMORY).kept, _total(one))]
    return line(view.Words(HELD * ends[0] + KEPT * (ends[1] - ends[0]), "chart"))


def _part(name: str) -> Callable[[LevelCost, Costs], str]:
    return lambda one, costs: _bytes(getattr(one.memory, name, 0))


def _batch(one: LevelCost, costs: Costs) -> str:
    return f"{costs.batch * one.fit.times:,}" if costs.batch and one.fit else "-"


def _measured(one: LevelCost, costs: Costs) -> str:
    """Return how ampdbg knows that the batch fits."""
    fit = one.fit or BatchFit(0)
    reckoned = f"estimated in proportion from {counted(len(fit.measured) - 1, 'doubling')}"
    return view.first((fit.why, fit.why), (fit.is_reckoned, reckoned), (fit.times, "measured"), (True, "does not fit"))


def _half_flops(one: LevelCost, costs: Costs) -> str:
    return share(one.flops.get("float16", 0) + one.flops.get("bfloat16", 0), sum(one.flops.values()))


_TRAINING: Columns = (
    (view.Column("does it train?"), _trained),
    (view.Column("loss", "number"), lambda one, costs: number(one.loss)),
    (view.Column("from FP32", "number"), _apart),
    (
        view.Column("noise", "number", is_spare=True),
        lambda one, costs: "-" if one.noise is None else percent(one.noise),
    ),
    (view.Column("half FLOPs", "number", is_spare=True), _half_flops),
)
_BARS: Columns = (
    (view.Column("", "sign", is_spare=True), _bar),
    (view.Column("bytes", "number"), lambda one, costs: byte_size(_total(one))),
    (view.Column("of FP32", "number"), _memory_of_fp32),
)
_PARTS: Columns = [
    (view.Column(name, "number", is_spare=name in ("masters", "gradients")), _part(name))
    for name in ("parameters", "masters", "gradients", "optimizer", "casts", "activations")
]
_ON_GPU: Columns = (
    (view.Column("a step", "number"), lambda one, costs: duration(one.seconds)),
    (view.Column("times FP32's speed", "number"), _speed),
    (view.Column("peak memory", "number"), lambda one, costs: _bytes(one.peak)),
    (view.Column("of FP32's", "number"), lambda one, costs: _of(one.peak, _fp32(costs).peak)),
)
_FIT: Columns = (
    (view.Column("batch", "number"), _batch),
    (view.Column("times", "number"), lambda one, costs: f"{one.fit.times:,}" if one.fit else "-"),
    (view.Column(""), _measured),
)


def _next_command(levels: Sequence[LevelCost], typed: view.CommandContext) -> view.NextCommand | None:
    at_o1 = [one for one in levels if one.level == "O1" and one.dtype == "float16"]
    roots = [one.finding.code for one in at_o1 if one.finding is not None and one.verdict != "inconclusive"]
    is_cured_by_pins = any(catalogued(code).pin_helps for code in roots) and not any(one.trains for one in at_o1)
    bad = next((one for one in levels if not one.trains and not one.pins), LevelCost("", "", ""))
    again = with_option(f"ampdbg scan {typed.config}", "--set", f"precision.level={bad.level}")
    again = with_option(again, "--set", f"precision.dtype={bad.dtype}") if bad.dtype == "bfloat16" else again
    suggest = f"ampdbg suggest-fp32 {typed.config}"
    return view.next_of(
        (is_cured_by_pins, "find what O1 needs in FP32, and make the patch", suggest),
        (bad.name, f"see why {bad.name} does not train", again),
    )
