"""The page of a comparison of levels: which of them train, what a step holds, and how large a batch fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ampdbg.agreement import FP32_ROUNDING, NOISE_FLOORS
from ampdbg.quantities import byte_size, counted, duration, number, percent, share
from ampdbg.record.codes import catalogued
from ampdbg.record.run import BatchFit, Costs, LevelCost, Record, StepMemory

from . import view
from .view import line, lines, ran_on, with_option

Columns = Sequence[tuple[view.Column, Callable[[LevelCost], view.Cell]]]
"""The columns of a table behind the level's name, and what each shows of a level."""

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


def page(record: Record, typed: view.Typed) -> view.Page:
    """What ``ampdbg cost`` says of the levels."""
    costs = record.costs or Costs()
    facts = f"{counted(record.planned_steps, 'step')} a level · {duration(record.elapsed)}"
    return view.Page(
        _headline(record, costs.levels),
        _sections(costs),
        (facts, *ran_on(record), *(f"Note: {note}" for note in costs.notes)),
        typed.record_path,
        _next_command(costs.levels, typed),
        story=(_story(costs),),
    )


def _headline(record: Record, levels: Sequence[LevelCost]) -> view.Headline:
    lower = [one for one in levels if one.level != "O0" and one.trains and one.memory is not None]
    best, fp32 = min(lower, key=_total, default=_fp32(levels)), _fp32(levels)
    ratio, speed_ratio = _of(_total(best), _total(fp32)), _speed(best, fp32)
    is_faster = best.seconds and fp32.seconds and float(speed_ratio) > 1.0
    speed = f", at {speed_ratio} times its speed" * bool(best.seconds and fp32.seconds)
    saves = ratio != "-" and float(ratio) < 1.0
    memory = view.first(
        (saves, f" in {ratio} of FP32's memory"),
        (_total(fp32), ", but in no less memory than FP32"),
        (True, ""),
    )
    none = f"No level below FP32 finishes {counted(record.planned_steps, 'step')} without a finding."
    is_gain = saves or not _total(fp32) or is_faster
    return view.first(
        (record.interrupted, view.Headline("warning", f"Interrupted after {counted(len(levels), 'level')}.")),
        (not lower, view.Headline("bad", none)),
        (True, view.Headline("good" if is_gain else "doubtful", f"{best.name} trains{memory}{speed}.")),
    )


def _story(costs: Costs) -> view.Table:
    """One line for each level: whether it trains, and what it takes."""
    fp32, budget = _fp32(costs.levels), costs.budget
    times = [one.seconds for one in costs.levels if one.seconds is not None]
    columns = (
        (view.Column("does it train?"), _trained),
        (view.Column("from FP32", "number", is_spare=True), _apart),
        (view.Column("memory", "number"), lambda one: _bytes(_total(one))),
        (view.Column("of FP32", "number"), lambda one: _of(_total(one), _total(fp32))),
        *((view.Column("speed", "number"), lambda one: _speed(one, fp32)) for _ in times[:1]),
        *((view.Column(f"batch in {_size(size)}", "number"), _batch(costs.batch)) for size in (budget,) if size),
    )
    notes = (BEYOND_NOISE,) * any("*" in _apart(one) for one in costs.levels)
    return _table("The levels", columns, costs.levels, *_errors(costs), *notes)


def _errors(costs: Costs) -> Iterator[str]:
    return (f"{one.name} could not run: {one.error}" for one in costs.levels if one.error)


def _size(budget: int) -> str:
    return f"{budget / 2**30:.4g} GiB" if budget % 2**20 == 0 else byte_size(budget)


def _sections(costs: Costs) -> tuple[view.Section, ...]:
    levels = [one for one in costs.levels if one.memory is not None]
    timed = levels * any(one.seconds is not None for one in levels)
    fitting, size = levels * (costs.budget is not None), _size(costs.budget or 0)
    of_levels: tuple[tuple[str, Columns, Sequence[LevelCost], str], ...] = (
        ("Memory of a step", _bars(levels, _total(_fp32(levels))), levels, BARS),
        ("", _PARTS, levels, CASTS),
        ("On this GPU", _on_gpu(_fp32(levels)), timed, ""),
        (f"The largest batch in {size}, by doubling", _fit(costs.batch), fitting, ""),
    )
    return (
        _table("Training", _TRAINING, costs.levels, *_errors(costs), LOSSES, HALF_FLOPS),
        *(_table(title, columns, rows, *below) for title, columns, rows, *below in of_levels if rows),
    )


def _table(title: str, columns: Columns, levels: Sequence[LevelCost], *below: str) -> view.Table:
    heads = (view.Column("level", "sign"), *(column for column, _ in columns))
    rows = tuple((line(one.name), *(shown(one) for _, shown in columns)) for one in levels)
    return view.Table(title, heads, rows, below=lines(*below, tone="faint"))


def _trained(one: LevelCost) -> view.Cell:
    skipped = f"; {one.skipped:,} of {counted(one.steps, 'step')} skipped" * bool(one.skipped)
    finding = one.finding
    is_sure = finding is not None and finding.severity == "error" and one.verdict != "inconclusive"
    found = " in ".join(filter(None, (finding.code, finding.module))) if finding else "not known"
    return view.first(
        (one.error, line(view.Words("✗ ", "bad"), "could not run")),
        (one.trains, line(view.Words("✓ ", "good"), f"yes{skipped}")),
        (is_sure, line(view.Words("✗ ", "bad"), f"{found}{skipped}")),
        (True, line(view.Words("? ", "doubtful"), f"{found}{skipped}")),
    )


def _apart(one: LevelCost) -> str:
    if one.apart is None:
        return "-"
    is_noise = one.apart <= max(FP32_ROUNDING, NOISE_FLOORS * (one.noise or 0.0))
    return percent(one.apart) + ("" if is_noise else "*")


_TRAINING: Columns = (
    (view.Column("does it train?"), _trained),
    (view.Column("loss", "number"), lambda one: number(one.loss)),
    (view.Column("from FP32", "number"), _apart),
    (view.Column("noise", "number", is_spare=True), lambda one: "-" if one.noise is None else percent(one.noise)),
    (
        view.Column("half FLOPs", "number", is_spare=True),
        lambda one: share(one.flops.get("float16", 0) + one.flops.get("bfloat16", 0), sum(one.flops.values())),
    ),
)


def _fp32(levels: Sequence[LevelCost]) -> LevelCost:
    """The level that the others are compared with; one that takes nothing where it could not run."""
    return next((one for one in levels if one.level == "O0"), LevelCost("", "", ""))


def _total(one: LevelCost) -> int:
    return (one.memory or NO_MEMORY).total


def _bytes(size: int | None) -> str:
    return byte_size(size) if size else "-"


def _of(size: float | None, fp32: float | None) -> str:
    return f"{size / fp32:.2f}" if size and fp32 else "-"


def _bars(levels: Sequence[LevelCost], fp32: int) -> Columns:
    most = max(map(_total, levels), default=0) or 1

    def bar(one: LevelCost) -> view.Cell:
        ends = [round(BAR_WIDTH * size / most) for size in (_total(one) - (one.memory or NO_MEMORY).kept, _total(one))]
        return line(view.Words(HELD * ends[0] + KEPT * (ends[1] - ends[0]), "chart"))

    return (
        (view.Column("", "sign", is_spare=True), bar),
        (view.Column("bytes", "number"), lambda one: byte_size(_total(one))),
        (view.Column("of FP32", "number"), lambda one: _of(_total(one), fp32)),
    )


def _part(name: str) -> Callable[[LevelCost], str]:
    return lambda one: _bytes(getattr(one.memory, name, 0))


_PARTS: Columns = [
    (view.Column(name, "number", is_spare=name in ("masters", "gradients")), _part(name))
    for name in ("parameters", "masters", "gradients", "optimizer", "casts", "activations")
]


def _speed(one: LevelCost, fp32: LevelCost) -> str:
    return _of(fp32.seconds, one.seconds)


def _on_gpu(fp32: LevelCost) -> Columns:
    return (
        (view.Column("a step", "number"), lambda one: duration(one.seconds)),
        (view.Column("times FP32's speed", "number"), lambda one: _speed(one, fp32)),
        (view.Column("peak memory", "number"), lambda one: _bytes(one.peak)),
        (view.Column("of FP32's", "number"), lambda one: _of(one.peak, fp32.peak)),
    )


def _batch(batch: int | None) -> Callable[[LevelCost], str]:
    """The largest batch that fits."""
    return lambda one: f"{batch * one.fit.times:,}" if batch and one.fit else "-"


def _fit(batch: int | None) -> Columns:
    def how(one: LevelCost) -> str:
        fit = one.fit or BatchFit(0)
        reckoned = f"estimated in proportion from {counted(len(fit.measured) - 1, 'doubling')}"
        return fit.why or (reckoned if fit.is_reckoned else "measured" if fit.times else "does not fit")

    return (
        (view.Column("batch", "number"), _batch(batch)),
        (view.Column("times", "number"), lambda one: f"{one.fit.times:,}" if one.fit else "-"),
        (view.Column(""), how),
    )


def _next_command(levels: Sequence[LevelCost], typed: view.Typed) -> view.NextCommand | None:
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
