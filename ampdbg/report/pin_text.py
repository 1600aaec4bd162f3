"""A set of pins as text: what each cures and costs, what dropping it does, and the lines for the config."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ampdbg.formats import FLOAT16
from ampdbg.record.findings import Finding
from ampdbg.record.pins import EVERYTHING, Pin, PinCost, PinSite

from . import quantities
from .layout import INDENT, indented, title, verbatim
from .quantities import counted

MAX_PINS = 16
"""So many are explained; all are among the lines for the config."""

NAME_WIDTH = 28
COSTS = ("FLOPs", "activations")
NARROW = 70
"""In fewer columns what each pin costs is left to the record, so that words are not broken."""

GAP = 2

PLAIN_YAML = re.compile(r"[A-Za-z_][\w.]*(:own)?")
"""Names that YAML reads as they stand; ``"*"`` and numbers it does not."""

YAML_WORDS = frozenset("y n yes no on off true false null".split())


def set_text(pins: Sequence[Pin], findings: Sequence[Finding], width: int) -> Iterator[RenderableType]:
    """The table of the set (at least one pin) in ``width`` columns."""
    names = max(len(_name(pin)) for pin in pins[:MAX_PINS])
    names = min(NAME_WIDTH, width // 3, max(names, *(len(_kind(pin)) for pin in pins[:MAX_PINS])))
    headings = COSTS if width >= NARROW else ()
    room = max(12, width - GAP - names - GAP - sum(len(heading) + GAP for heading in headings))
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="dim")
    table.add_column("pin", width=names, overflow="fold")
    table.add_column("why", width=room, overflow="fold")
    for heading in headings:
        table.add_column(heading, min_width=len(heading), justify="right", no_wrap=True)
    told: set[object] = set()
    for pin in pins[:MAX_PINS]:
        line = _line(pin)
        why = _same_line(pin) if line in told else _why(pin, findings, room)
        table.add_row(_pin(pin), why, *_costs(pin.cost)[: len(headings)])
        told |= {line} - {None}
    yield title("The set" if any(pin.source is None for pin in pins) else "The lines")
    yield indented(table)
    if len(pins) > MAX_PINS:
        yield indented(Text(f"… and {len(pins) - MAX_PINS} more (all in the record)", style="dim"))


def _name(pin: Pin) -> str:
    if pin.source is not None:
        return f"{pin.source.file}:{pin.source.line}"
    return pin.name or "the whole model"


def _kind(pin: Pin) -> str:
    lines = "own lines of " if pin.own and pin.class_name else "own lines" if pin.own else ""
    return lines + pin.class_name


def _pin(pin: Pin) -> Text:
    text = Text(_name(pin), style="bold cyan")
    return text.append(f"\n{_kind(pin)}", style="not bold dim") if _kind(pin) else text


def _why(pin: Pin, findings: Sequence[Finding], room: int) -> Text:
    lines: list[Text] = []
    if not pin.sites and pin.tied:
        return Text(f"tied to {quantities.listed(pin.tied)}, and pinned with it", style="dim")
    if not pin.sites:
        lines.append(Text("no op was seen to go wrong in it", style="dim"))
    elif pin.reason is not None and pin.reason < len(findings):
        lines.append(Text(findings[pin.reason].code, style="red"))
    if pin.sites:
        lines += _site(pin.sites[0], pin, room)
    if len(pin.sites) > 1:
        lines.append(Text(f"and {counted(len(pin.sites) - 1, 'more op')}: {_lines(pin.sites[1:])}", style="dim"))
    if pin.without:
        lines.append(Text.assemble(("without it: ", "yellow"), pin.without))
    return Text("\n").join(lines)


def _line(pin: Pin) -> object:
    """What goes wrong first without the pin: an op on a line, which many instances of a class may share."""
    return (pin.reason, pin.sites[0].phase, pin.sites[0].op, pin.sites[0].source) if pin.sites else None


def _same_line(pin: Pin) -> Text:
    value = pin.sites[0].value
    lines = [Text("the same line" + (f": {_against_half(value)}" if value is not None else ""))]
    if pin.without:
        lines.append(Text.assemble(("without it: ", "yellow"), pin.without.partition(": ")[0]))
    return Text("\n").join(lines)


def _site(site: PinSite, pin: Pin, room: int) -> Iterator[Text]:
    inner = site.module if site.module != pin.module else ""
    call = f"call {site.call}" if site.call else ""
    line = f"{site.source.file}:{site.source.line}" if site.source else ""
    backward = "backward" if site.phase == "backward" else ""
    yield Text(" · ".join(part for part in (backward, inner, call, _op(site.op), line) if part))
    if site.source is not None and site.source.text.strip():
        text = site.source.text.strip()
        yield Text(text if len(text) <= room else f"{text[: room - 1]}…", style="bold")
    if site.value is not None:
        yield Text(_against_half(site.value))


def _op(name: str) -> str:
    """``aten.mm.default`` is known as ``mm``."""
    return name.removeprefix("aten.").removesuffix(".default")


def _lines(sites: Sequence[PinSite]) -> str:
    """The ops, each with its line, in a few words."""
    return quantities.listed(
        tuple(dict.fromkeys(f"{_op(site.op)}{f':{site.source.line}' if site.source else ''}" for site in sites))
    )


def _against_half(value: float) -> str:
    """A value in FP32 beside the limit of FP16 that it breaks, if it does."""
    size = abs(value)
    if size >= FLOAT16.overflow_threshold:
        shown = f"{value:.0f}" if size < 1e7 else quantities.number(value)
        return f"{shown} in FP32, above FP16's {FLOAT16.largest:.0f}"
    if 0.0 < size < FLOAT16.smallest_subnormal:
        return f"{quantities.number(value)} in FP32, below FP16's {quantities.number(FLOAT16.smallest_subnormal)}"
    return f"{quantities.number(value)} in FP32"


# What it costs


def _costs(cost: PinCost | None) -> tuple[str, str]:
    return (percent(cost.flops), percent(cost.activations)) if cost is not None else ("-", "-")


def cost_text(cost: PinCost) -> str:
    """What the whole set takes out of FP16, in a sentence."""
    return (
        f"The set takes {percent(cost.flops)} of the forward pass's FLOPs and {percent(cost.activations)} of its "
        f"FP16 activations ({size_text(cost.activation_bytes)}) out of FP16."
    )


def percent(share: float) -> str:
    """A share of 0 to 1; never rounded to nothing, nor to the whole."""
    if not math.isfinite(share):
        return "-"
    if share == 0.0 or share == 1.0:
        return f"{share:.0%}"
    return "<0.1%" if abs(share) < 0.001 else f"{min(share, 0.999) if share < 1.0 else share:.1%}"


def size_text(count: int) -> str:
    """``512 B``, ``1.2 MB``: decimal units."""
    size, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while size >= 999.5 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.0f} {units[0]}" if units[0] == "B" or size >= 10 else f"{size:.1f} {units[0]}"


# What to paste


def pins_yaml(names: Sequence[str], config: Mapping[str, object]) -> list[str]:
    """The lines of a config that pin ``names``, beside the pins that ``config`` has already.

    The whole model, which has no name, is the pattern that every name matches.
    """
    precision = config.get("precision")
    already = precision.get("pins") if isinstance(precision, Mapping) else None
    given = [str(name) for name in already] if isinstance(already, (list, tuple)) else []
    every = dict.fromkeys([*given, *(name or EVERYTHING for name in names)])
    return ["precision:", "  pins:", *(f"    - {_scalar(name)}" for name in every)]


def _scalar(name: str) -> str:
    is_plain = PLAIN_YAML.fullmatch(name) and name.casefold() not in YAML_WORDS
    return name if is_plain and name.isascii() else json.dumps(name, ensure_ascii=True)


def config_text(names: Sequence[str], config: Mapping[str, object]) -> Iterator[RenderableType]:
    """The lines to paste."""
    yield title("In the config")
    yield from (verbatim(line, "green", INDENT) for line in pins_yaml(names, config))
