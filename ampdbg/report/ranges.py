"""A range profile as text: the tightest places, the loss scales that work, and what bounds them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ampdbg.diagnosis.ranges import Window, module_windows, window
from ampdbg.record.codes import catalogued
from ampdbg.record.run import Record, Site

from . import quantities
from .drawing import draw
from .exponent_bar import WIDTH, exponent_bar
from .finding_text import findings_text
from .layout import INDENT, indented, title, verbatim
from .next_command import with_option
from .quantities import counted
from .text import environment_facts, named_from
from .verdict import LOOK

Order = Literal["tightest", "execution"]

TOP = 10
NEAR_BITS = 2.0
"""Closer to the limit than this many doublings is worth a mark."""

SHOWN_LINES = 5
"""The source text is printed for so many of the rows on top."""

BESIDE_WHERE = 2 + 2 + 6 + 10 + 5 + WIDTH + 1
"""The columns beside the widest one: the indent, the mark, bits, |max|, pass and the bar, each with its gap."""


def render_ranges(
    record: Record,
    *,
    width: int,
    color: bool,
    unicode: bool = True,
    config: str = "CONFIG",
    record_path: str = "",
    folder: str = "",
    order: Order = "tightest",
    top: int = TOP,
) -> str:
    """Renders the record of ``ampdbg ranges`` for a terminal of ``width`` columns.

    Args:
        record: a diagnosed record.
        width: columns.
        color: whether to use ANSI colours.
        unicode: without it, ASCII alone.
        config: the config's name in the commands that are suggested.
        record_path: where the record was written.
        folder: source files below it are named relative to it.
        order: ``tightest`` first, or in the order of ``execution``.
        top: how many sites, and how many modules, are listed.
    """
    record = named_from(folder, record)
    return draw(_sections(record, order, top, width, config, record_path), width=width, color=color, unicode=unicode)


def _sections(
    record: Record, order: Order, top: int, width: int, config: str, record_path: str
) -> Iterator[RenderableType]:
    mark, style = LOOK[record.verdict]
    if record.interrupted:
        mark, style = "!", "bold yellow"
    yield Text(f"{mark} {_headline(record)}", style=style)
    others = [finding for finding in record.findings if not catalogued(finding.code).in_range_table]
    if others:
        yield Group(*findings_text(others))
    if record.sites:
        yield Group(*_sites(record.sites, order, top, width))
        yield Group(*_windows(record.sites, top))
    yield Group(*_summary(record, config, record_path))


# The sentence on top


def _headline(record: Record) -> str:
    if record.interrupted:
        return f"Interrupted after {counted(len(record.steps), 'step')}: no ranges were measured."
    if record.autocast_error is not None:
        return "The step raised an error that autocast causes; its ranges could not be measured."
    starts = [site for site in record.sites if site.phase == "forward" and site.overflow == "starts"]
    if starts:
        return f"{counted(len(starts), 'place')} would overflow in FP16{_hidden(len(starts))}."
    if record.findings:
        return "The forward pass fits FP16; its gradients do not, at any one loss scale."
    return f"All within FP16's range at {_step(record)}: {_spare(record.sites)}, and {_scales(window(record.sites))}."


def _hidden(starts: int) -> str:
    if starts == 1:
        return ""
    return f"; behind the first inf an FP16 run would hide the other {starts - 1 if starts > 2 else 'one'}"


def _spare(sites: Sequence[Site]) -> str:
    forward = [site.headroom_bits for site in sites if site.phase == "forward"]
    return f"{min(forward):.1f} bits to spare in the forward pass" if forward else "nothing runs in half forward"


def _scales(whole: Window) -> str:
    if math.isinf(whole.ceiling):
        return "any loss scale works" if whole.floor == 0.0 else f"loss scales from {_scale(whole.floor)} up work"
    low = f"from {_scale(whole.floor)} " if whole.floor else ""
    return f"loss scales {low}to {_scale(whole.ceiling)} work"


# The sites


def _sites(sites: Sequence[Site], order: Order, top: int, width: int) -> Iterator[RenderableType]:
    tightest = sorted(sites, key=lambda site: (_headroom(site), site.order))[:top]
    shown = sorted(tightest, key=lambda site: site.order) if order == "execution" else tightest
    yield title("Tightest against FP16's limit" + (", in order of execution" if order == "execution" else ""))
    with_text = {site.order for site in tightest[:SHOWN_LINES]}
    yield indented(_site_table(shown, with_text, width - BESIDE_WHERE))
    if len(sites) > len(shown):
        yield indented(Text(f"… and {counted(len(sites) - len(shown), 'site')} more (all in the record)", style="dim"))
    legend = [text for test, text in LEGEND if any(test(site) for site in shown)]
    if any(site.phase == "backward" for site in shown):
        legend.append("gradients at a loss scale of 1")
    if legend:
        yield indented(Text(" · ".join(legend), style="dim"))


LEGEND = (
    (lambda site: site.overflow == "starts", "✗ an overflow starts here"),
    (lambda site: site.overflow == "carried", "↳ it was carried here, or is a constant"),
    (lambda site: _mark(site)[0] == "!", f"! within {NEAR_BITS:.0f} bits of the limit"),
)


def _headroom(site: Site) -> float:
    return -math.inf if math.isnan(site.headroom_bits) else site.headroom_bits


def _site_table(sites: Sequence[Site], with_text: set[int], room: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("", no_wrap=True)
    table.add_column("bits", justify="right", no_wrap=True)
    table.add_column("|max|", justify="right", no_wrap=True)
    table.add_column("pass", no_wrap=True)
    table.add_column("2^-24" + "2^15".rjust(WIDTH - 6), no_wrap=True)
    table.add_column("where", overflow="fold")
    for site in sites:
        mark, style = _mark(site)
        table.add_row(
            Text(mark, style=style),
            Text(f"{site.headroom_bits:.1f}", style=style),
            quantities.number(site.abs_max),
            "fwd" if site.phase == "forward" else "bwd",
            Text(exponent_bar(site.lowest_exponent, site.exponents), style="cyan"),
            _where(site, room if site.order in with_text else 0),
        )
    return table


def _mark(site: Site) -> tuple[str, str]:
    if site.overflow:
        return ("✗", "bold red") if site.overflow == "starts" else ("↳", "red")
    return ("!", "yellow") if site.headroom_bits < NEAR_BITS else ("", "")


def _where(site: Site, room: int) -> Text:
    """Module, op and line; below them the line's text, cut to ``room`` columns, or left out where there is none."""
    call = f" (call {site.call})" if site.calls > 1 and site.call > 0 else ""
    parts = [f"{_module(site.module)}{call}", _op(site.op)]
    if site.source is not None:
        parts.append(f"{site.source.file}:{site.source.line}")
    where = Text(" · ".join(parts))
    if room > 1 and site.source is not None and site.source.text:
        text = site.source.text
        where.append(f"\n{text if len(text) <= room else text[: room - 1] + '…'}", style="dim")
    return where


def _module(name: str) -> str:
    return name or "(root)"


def _op(name: str) -> str:
    """``aten.mm.default`` is known as ``mm``."""
    return name.removeprefix("aten.").removesuffix(".default")


# The loss scales


def _windows(sites: Sequence[Site], top: int) -> Iterator[RenderableType]:
    modules = sorted(module_windows(sites), key=_width)
    if not modules:
        return
    yield title("Loss scales that work")
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("module", overflow="fold", max_width=24)
    table.add_column("from", justify="right", no_wrap=True)
    table.add_column("to", justify="right", no_wrap=True)
    table.add_column("set by (op:line)", overflow="fold")
    whole = window(sites)
    table.add_row(Text("the whole model", style="bold"), *_ends(whole), _bounds(whole, with_module=True))
    for one in modules[:top]:
        table.add_row(_module(one.module), *_ends(one), _bounds(one))
    yield indented(table)
    if len(modules) > top:
        yield indented(Text(f"… and {counted(len(modules) - top, 'module')} more", style="dim"))
    if not whole.is_open:
        yield indented(Text("No scale works for the whole model: the two sites that bound it need different ones."))


def _width(one: Window) -> float:
    """How many times the scale can double inside the window; negative when it is empty."""
    return math.log2(one.ceiling) - math.log2(one.floor) if _is_bounded(one) else math.inf


def _is_bounded(one: Window) -> bool:
    return 0.0 < one.floor < math.inf and 0.0 < one.ceiling < math.inf


def _ends(one: Window) -> tuple[Text, Text]:
    style = "" if one.is_open else "red"
    return Text(_scale(one.floor) if one.floor else "any", style=style), Text(_scale(one.ceiling), style=style)


def _scale(value: float) -> str:
    return "any" if math.isinf(value) else quantities.scale(value)


def _bounds(one: Window, with_module: bool = False) -> str:
    """The site that sets the floor and the one that sets the ceiling."""
    ends = (one.highest_floor, one.lowest_ceiling)
    return " … ".join("any" if site is None else _short(site, with_module) for site in ends)


def _short(site: Site, with_module: bool) -> str:
    line = f":{site.source.line}" if site.source else ""
    return f"{_module(site.module)} {_op(site.op)}{line}" if with_module else f"{_op(site.op)}{line}"


# The end


def _summary(record: Record, config: str, record_path: str) -> Iterator[RenderableType]:
    facts = (_step(record), counted(len(record.sites), "site"), quantities.duration(record.elapsed))
    yield Text(" · ".join(facts), style="dim")
    yield Text(" · ".join(environment_facts(record)), style="dim")
    for note in (*record.environment.notes, *record.unseen.notes):
        yield Text(f"Note: {note}", style="dim")
    if record_path:
        yield verbatim(f"Record: {record_path}", "dim")
    if record.findings:
        yield Text.assemble(("Next: ", "bold"), "the shadow proposes; a run in FP16 confirms")
        yield verbatim(f"ampdbg scan {config}", "bold cyan", INDENT)
    elif record.sites:
        yield Text.assemble(("Next: ", "bold"), "the same after some training")
        yield verbatim(
            with_option(f"ampdbg ranges {config}", "--steps", record.planned_steps + 50), "bold cyan", INDENT
        )


def _step(record: Record) -> str:
    return f"step {max(record.planned_steps - 1, 0)}"
