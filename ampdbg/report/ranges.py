"""The page of a range profile: the tightest sites, the loss scales that work, and what bounds them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import PureWindowsPath
from typing import Any

from ampdbg.diagnosis.producers import op_name
from ampdbg.diagnosis.ranges import (
    Window,
    check_in,
    fails_in_fp32,
    in_half,
    is_mask,
    measured_step,
    module_windows,
    refuted_by,
    what_fails,
    window,
)
from ampdbg.formats import FLOAT16, Exponents
from ampdbg.quantities import counted, duration, listed, multiple, number, scale
from ampdbg.record.codes import catalogued
from ampdbg.record.findings import place_of
from ampdbg.record.pins import in_words
from ampdbg.record.run import Readiness, Record, Replay, Site

from . import view
from .scan import REPAIRED, TONES, raised, stopped
from .view import line, lines, more, ran_on, with_option

NEAR_BITS = 2.0
"""A site closer to the limit than this many doublings gets a mark."""

SHOWN = 10
"""The most sites and modules in a list."""

BRIEF_SITES, BRIEF_MODULES, BESIDE_FINDINGS = 5, 2, 3
"""The most sites and modules in a story (the brief form of a page), and the most sites beside findings."""

SHOWN_LINES = 5
"""This many of the tightest sites show the text of their line."""

SITE_COLUMNS = (
    view.Column("", "sign"),
    view.Column("bits", "number"),
    view.Column("|max|", "number"),
    view.Column("pass", "sign"),
    view.Column("", "histogram"),
    view.Column("where"),
)

BRIEF_COLUMNS = (*SITE_COLUMNS[:4], SITE_COLUMNS[5])

WINDOW_COLUMNS = (
    view.Column("module", most=24),
    view.Column("from", "number"),
    view.Column("to", "number"),
    view.Column("set by (op:line)"),
)


def page(record: Record, typed: view.CommandContext) -> view.Page:
    """Return the page of ``ampdbg ranges``."""
    facts = [_step(record), counted(len(record.sites), "site")]
    if record.readiness is not None:
        scales = listed(dict.fromkeys(_scale(check.scale) for check in record.checks if check.dtype == FLOAT16.name))
        facts.append(f"measured in bfloat16, then run in FP16 at a loss scale of {scales}, without the optimizer")
    facts.append(duration(record.elapsed))
    # The findings that the table of sites does not show.
    others = tuple(one for one in record.findings if not catalogued(one.code).in_range_table)
    is_led_by_table = any(site.overflow == "starts" for site in record.sites)
    error, sites = raised(record), record.sites * (not record.error)
    windows = _window_table(record, typed.top or SHOWN) if refuted_by(record) is None else NO_WINDOWS
    narrowest = _window_table(record, typed.top or BRIEF_MODULES) if sites and not others else NO_WINDOWS
    below = []
    for one in others * bool(sites and is_led_by_table):
        tone: view.Tone = "bad" if one.severity == "error" else "doubtful"
        below.append(line(view.Words(f"{one.severity} {one.code}", tone), f" · {one.message}"))
    story = view.filled(
        error,
        view.Findings(others * (not is_led_by_table), is_brief=True),
        _site_table(sites, typed, BESIDE_FINDINGS if others else BRIEF_SITES, is_brief=True),
        replace(narrowest, below=()),  # a finding names what bounds the windows
        view.Paragraph(tuple(below)),
    )
    return view.Page(
        view.Headline(_tone(record), _first_of(SENTENCES, record)),
        view.filled(error, view.Findings(others), _site_table(record.sites, typed, SHOWN), windows),
        (" · ".join(facts), *ran_on(record)),
        typed.record_path,
        _next_command(record, typed),
        story,
    )


CONFIRM = "confirm it with a run in FP16"


def _next_command(record: Record, typed: view.CommandContext) -> view.NextCommand | None:
    is_config, ready = record.script is None, record.readiness
    again = f"ampdbg {'scan' if is_config else 'replay'} {typed.config}"
    measure, suggest = f"ampdbg ranges {typed.config}", f"ampdbg suggest-fp32 {typed.config}"
    longer = with_option(measure, "--steps", record.planned_steps + 50)
    suggest, scan = (with_option(command, "--set", "precision.dtype=float16") for command in (suggest, again))
    is_pinned = ready is not None and (ready.pins or ready.trains is False)
    return view.next_of(
        (ready and not is_config, "", ""),  # a capture is replayed in its own format
        (record.error, REPAIRED, measure),
        (is_pinned, "find the smallest set of pins, and prove it", suggest),
        (ready, CONFIRM, scan),
        (refuted_by(record), "see where it starts", again),
        (record.findings or record.unseen.unmeasured, CONFIRM, again),
        (record.sites and is_config, "measure again after some training", longer),
    )


def _step(record: Record) -> str:
    return f"step {measured_step(record)}"


def _tone(record: Record) -> view.Tone:
    """Return the tone; an overflow that no FP16 run has shown yet is a warning, not an open question."""
    is_measured = refuted_by(record) is None and record.autocast_error is None and record.verdict == "inconclusive"
    is_warning = stopped(record) or (is_measured and (_starting(record) or record.findings))
    return "warning" if is_warning else TONES[record.verdict]


def _ready(record: Record, ready: Readiness) -> str:
    """Return the sentence about a step that runs in bfloat16."""
    first, starts = check_in(record, FLOAT16.name), _starting(record)
    fails = what_fails(first) if first else ""
    overflows = f", though FP16 overflows at {counted(starts, 'place')}" * bool(starts)
    but = f", without which {fails}" if ready.pins else overflows
    return READY[ready.trains].format(
        step=_step(record),
        half=_first_of(OF_HALF, record),
        fails=fails,
        pinned=f"{listed(map(in_words, ready.pins)) or 'nothing'} pinned{but}",
        largest=f"{number(ready.largest)}, is {multiple(ready.largest, FLOAT16.largest)} 65,504",
        scales=_scales(window(in_half(record))),
    )


READY: Mapping[bool | None, str] = {
    True: "Judging by {step}, this would train in FP16 with {pinned}: its largest magnitude, {largest}, and {scales}.",
    False: "Judging by {step}, this would not train in FP16: {fails} at any loss scale, "
    "and ampdbg found no pin that helps.",
    None: "It is open whether this would train in FP16. {half}",
}
"""The sentences, by whether the workload would train in FP16 (None: unknown)."""


def _starting(record: Record) -> int:
    """Return the number of sites where an overflow of the forward pass starts."""
    return sum(site.phase == "forward" and site.overflow == "starts" for site in record.sites)


def _overflowing(record: Record, starts: int) -> str:
    others = "one" if starts == 2 else starts - 1
    hidden = f"; an FP16 run would show the first and hide the other {others}" * (starts > 1)
    return f"{counted(starts, 'place')} would overflow in FP16{hidden}."


def _refuted(record: Record, bad: Replay) -> str:
    """Return the sentence about a step that is not finite although its ranges alone would fit."""
    where, fails, failure = _step(record).capitalize(), fails_in_fp32(record), what_fails(bad)
    fp32 = check_in(record, "float32") or bad
    scale_tried = f", at a loss scale of {_scale(bad.scale)} that the ranges allow" * math.isfinite(bad.loss)
    at_any = ", and no loss scale helps" * (not bad.error)
    in_fp32 = ", although it is in FP32" * (fails is not None)
    unknown = f"{where} is not finite in bfloat16, in which ampdbg measures ranges{in_fp32}: {failure}. So nothing is "
    return view.first(
        (bad.dtype == FLOAT16.name, f"{_measured(record)}; but in FP16 {failure}{scale_tried or at_any}."),
        (fails, f"{where} is not finite in FP32 either: {what_fails(fp32)}. Neither a pin nor a loss scale helps."),
        (True, f"{unknown}known about FP16."),
    )


def _fitting(record: Record, _: object) -> str:
    whole = window(record.sites)
    # For a captured step its own scale, if that is not one that works.
    own = record.steps[-1].scale if record.script is not None and record.steps else whole.floor
    side = "below" if own < whole.floor else "above"
    is_outside = whole.is_open and not whole.floor <= own <= whole.ceiling
    of_own = f"; the step's own scale, {_scale(own)}, is {side} them" * is_outside
    # The ops without ranges, and the result of a replay in FP16 with them.
    names, half = listed(record.unseen.unmeasured), check_in(record, "float16")
    tried = f"; a replay with them is finite in FP16 at a loss scale of {_scale(half.scale)}" if half else ""
    unmeasured = f" for what was measured. Not measured: {names}{tried}" * bool(names)
    return f"{_measured(record)}, and {_scales(whole)}{of_own}{unmeasured}."


Sentences = tuple[tuple[Callable[[Record], Any], Callable[[Record, Any], str]], ...]
"""Rows of a condition of a record, and the sentence made from the record and the value of the condition."""

NO_SCALE = "The forward pass fits FP16, but no single loss scale fits its gradients."
AUTOCAST_RAISES = "Autocast made the step raise an error, so its ranges could not be measured."

OF_HALF: Sentences = (
    (refuted_by, _refuted),
    (_starting, _overflowing),
    (attrgetter("findings"), lambda record, _: NO_SCALE),
    (lambda record: True, _fitting),
)
SENTENCES: Sentences = (
    (stopped, lambda record, early: f"{early}, before the ranges were measured."),
    (attrgetter("autocast_error"), lambda record, _: AUTOCAST_RAISES),
    (attrgetter("readiness"), _ready),
    *OF_HALF,
)


def _first_of(rows: Sentences, record: Record) -> str:
    return next(said(record, found) for holds, said in rows if (found := holds(record)))


def _measured(record: Record) -> str:
    """Return what the forward pass shows, if no overflow starts in it."""
    of_what = " that was measured" * bool(record.unseen.unmeasured)
    forward = [site for site in record.sites if site.phase == "forward"]
    beyond = sum(site.headroom_bits < 0.0 for site in forward)
    places = counted(beyond, "place")
    if beyond:
        return f"No op{of_what} overflows by itself, but an input or a constant of the code exceeds FP16 at {places}"
    fits = f"Everything{of_what} fits FP16 at {_step(record)}"
    if not forward:
        return f"{fits}: no op of the forward pass runs in half precision"
    computed = [site for site in forward if not site.overflow] or forward
    bits = min(site.headroom_bits for site in computed)
    return f"{fits}: the forward pass has {bits:.1f} bits to spare (a factor of {number(float(f'{2**bits:.2g}'))})"


def _scales(whole: Window) -> str:
    low, high = _scale(whole.floor), _scale(whole.ceiling)
    return view.first(
        (high != "any", f"loss scales {f'from {low} ' * bool(whole.floor)}to {high} work"),
        (whole.floor, f"loss scales from {low} up work"),
        (True, "any loss scale works"),
    )


def _site_table(sites: Sequence[Site], typed: view.CommandContext, top: int, *, is_brief: bool = False) -> view.Table:
    """Return the tightest sites; in brief one line each, without their exponents."""
    # Carried overflows, such as the masks of thirty layers, must not displace the sites where one starts.
    places = sorted(sites, key=lambda site: (site.overflow != "starts", is_mask(site), site.headroom_bits, site.order))
    tightest = places[: typed.top or top]
    is_ordered = typed.order == "execution"
    shown = sorted(tightest, key=lambda site: site.order) if is_ordered else tightest
    with_text = {site.order for site in tightest[: 0 if is_brief else SHOWN_LINES]}
    marks, phases = set(map(_mark, shown)), {site.phase for site in shown}
    legend = [f"{mark.text} {meaning}" for mark, _, meaning in MARKS[:-1] if mark in marks]
    legend += ["gradients at a loss scale of 1"] * ("backward" in phases)
    below = (*more(len(sites) - len(shown), "site"), *lines(" · ".join(legend), tone="faint"))
    return view.Table(
        f"Tightest against FP16's limit{', in order of execution' * is_ordered} (bits: doublings left to 65,504)",
        BRIEF_COLUMNS if is_brief else SITE_COLUMNS,
        tuple(_site_row(site, site.order in with_text, is_brief) for site in shown),
        below=below[-1:] if is_brief else below,
    )


MARKS: tuple[tuple[view.Words, Callable[[Site], bool], str], ...] = (
    (view.Words("✗", "bad"), lambda site: site.overflow == "starts", "an overflow starts here"),
    (view.Words("↳", "bad"), lambda site: site.overflow == "carried", "an input or a constant carries it in"),
    (
        view.Words("!", "doubtful"),
        lambda site: site.headroom_bits < NEAR_BITS,
        f"within {NEAR_BITS:.0f} bits of the limit",
    ),
    (view.Words(""), lambda site: True, ""),
)
"""The mark before a site, its condition and its meaning; the first that applies is shown."""


def _site_row(site: Site, with_text: bool, is_brief: bool) -> tuple[view.Cell, ...]:
    mark, at = _mark(site), site.source
    call = f" (call {site.call})" * (site.calls > 1 and site.call > 0)
    place = PureWindowsPath(place_of(at)).name if is_brief else place_of(at)
    where = line(" · ".join(filter(None, (f"{view.module(site.module)}{call}", op_name(site.op), place))))
    text = (line(at.text.strip(), tone="faint", is_code=True),) if with_text and at and at.text else ()
    shown = (
        line(mark),
        line(f"{site.headroom_bits:.1f}", tone=mark.tone),
        number(site.abs_max),
        "fwd" if site.phase == "forward" else "bwd",
    )
    return (*shown, where) if is_brief else (*shown, Exponents(site.lowest_exponent, site.exponents), (where, *text))


def _mark(site: Site) -> view.Words:
    return next(mark for mark, applies, _ in MARKS if applies(site))


NO_WINDOWS = view.Table("", WINDOW_COLUMNS, ())


def _window_table(record: Record, top: int) -> view.Table:
    """Return the narrowest windows; no rows if no gradient was in half."""
    whole, modules = window(in_half(record)), sorted(module_windows(in_half(record)), key=_width)
    if not modules:
        return NO_WINDOWS
    rows = [(line("the whole model", tone="strong"), *_ends(whole), _bounds(whole, with_module=True))]
    rows += [(line(view.module(one.module)), *_ends(one), _bounds(one)) for one in modules[:top]]
    none = line("No scale works for the whole model: the two sites that limit it need different ones.")
    title = view.first(
        (record.readiness and record.readiness.pins, "Loss scales that work with these pins"),
        (_starting(record), "Loss scales that would work if the forward pass did not overflow"),
        (record.unseen.unmeasured, "Loss scales that work, as far as measured"),
        (True, "Loss scales that work"),
    )
    below = (*more(len(modules) - top, "module"), *(none,) * (not whole.is_open))
    return view.Table(title, WINDOW_COLUMNS, tuple(rows), below=below)


def _width(one: Window) -> float:
    """Return how many times the scale can double inside the window; negative if it is empty."""
    is_bounded = 0.0 < one.floor < math.inf and 0.0 < one.ceiling < math.inf
    return math.log2(one.ceiling) - math.log2(one.floor) if is_bounded else math.inf


def _ends(one: Window) -> tuple[view.StyledLine, view.StyledLine]:
    tone: view.Tone = "plain" if one.is_open else "bad"
    return line(_scale(one.floor) if one.floor else "any", tone=tone), line(_scale(one.ceiling), tone=tone)


def _scale(value: float) -> str:
    return "any" if math.isinf(value) else scale(value)


def _bounds(one: Window, with_module: bool = False) -> str:
    ends = []
    for site in (one.highest_floor, one.lowest_ceiling):
        module = f"{view.module(site.module)} " if with_module and site else ""
        line_number = f":{site.source.line}" if site and site.source else ""
        ends.append(f"{module}{op_name(site.op)}{line_number}" if site else "any")
    return f"{'none works: ' * (not one.is_open)}{' … '.join(ends)}"
