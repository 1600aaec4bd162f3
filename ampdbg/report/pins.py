"""A set of pins on a page: what each cures and costs, the lines to paste, the proof of a patch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import yaml

from ampdbg.diagnosis.producers import op_name
from ampdbg.formats import FLOAT16
from ampdbg.quantities import byte_size, counted, listed, number, share
from ampdbg.record.findings import Finding
from ampdbg.record.pins import EVERYTHING, Pin, PinCost, PinSite, Proof

from .view import Column, Line, Snippet, Table, Words, line, more

MAX_PINS = 16
"""So many are explained; all are among the lines for the config."""

PIN_COLUMNS = (
    Column("pin", most=28),
    Column("why"),
    Column("FLOPs", "number", is_spare=True),
    Column("activations", "number", is_spare=True),
)

PROOF_COLUMNS = (Column(kind="sign"), Column(), Column())


def pin_table(pins: Sequence[Pin], findings: Sequence[Finding]) -> Table:
    """The set, at least one pin."""
    rows = []
    lines: set[object] = set()
    for pin in pins[:MAX_PINS]:
        first = _first_line(pin)
        why = _same_line(pin) if first in lines else _why(pin, findings)
        rows.append((_pin(pin), why, *_costs(pin.cost)))
        lines |= {first} - {None}
    title = "The set" if any(pin.source is None for pin in pins) else "The lines"
    return Table(title, PIN_COLUMNS, tuple(rows), below=more(len(pins) - MAX_PINS))


def _pin(pin: Pin) -> tuple[Line, ...]:
    name = f"{pin.source.file}:{pin.source.line}" if pin.source is not None else pin.name or "the whole model"
    own = "own lines of " if pin.own and pin.class_name else "own lines" if pin.own else ""
    kind = own + pin.class_name
    return (line(name, tone="name"), *((line(kind, tone="faint"),) if kind else ()))


def _why(pin: Pin, findings: Sequence[Finding]) -> tuple[Line, ...]:
    if not pin.sites and pin.tied:
        return (line(f"tied to {listed(pin.tied)}, and pinned with it", tone="faint"),)
    lines = [] if pin.sites else [line("no op of its own fails", tone="faint")]
    if pin.sites and pin.reason is not None and pin.reason < len(findings):
        lines.append(line(findings[pin.reason].code, tone="bad"))
    if pin.sites:
        lines += _site(pin.sites[0], pin)
    if len(pin.sites) > 1:
        lines.append(line(f"and {counted(len(pin.sites) - 1, 'more op')}: {_ops(pin.sites[1:])}", tone="faint"))
    return (*lines, *_without(pin.without))


def _without(what: str) -> tuple[Line, ...]:
    return (line(Words("without it: ", "doubtful"), what),) if what else ()


def _first_line(pin: Pin) -> object:
    """What goes wrong first without the pin: an op on a line, which many instances of a class may share."""
    return (pin.reason, pin.sites[0].phase, pin.sites[0].op, pin.sites[0].source) if pin.sites else None


def _same_line(pin: Pin) -> tuple[Line, ...]:
    value = pin.sites[0].value
    same = line("the same line" + (f": {_against_half(value)}" if value is not None else ""))
    return (same, *_without(pin.without.partition(": ")[0]))


def _site(site: PinSite, pin: Pin) -> Iterator[Line]:
    inner = site.module if site.module != pin.module else ""
    call = f"call {site.call}" if site.call else ""
    place = f"{site.source.file}:{site.source.line}" if site.source else ""
    backward = "backward" if site.phase == "backward" else ""
    yield line(" · ".join(part for part in (backward, inner, call, op_name(site.op), place) if part))
    if site.source is not None and site.source.text.strip():
        yield line(site.source.text.strip(), tone="strong", is_code=True)
    if site.value is not None:
        yield line(_against_half(site.value))


def _ops(sites: Sequence[PinSite]) -> str:
    """The ops, each with its line, in a few words."""
    ops = (f"{op_name(site.op)}{f':{site.source.line}' if site.source else ''}" for site in sites)
    return listed(list(dict.fromkeys(ops)))


def _against_half(value: float) -> str:
    """A value in FP32 beside the limit of FP16 that it breaks, if it does."""
    size = abs(value)
    if size >= FLOAT16.overflow_threshold:
        return f"{number(value)} in FP32, above FP16's limit of {number(FLOAT16.largest)}"
    if 0.0 < size < FLOAT16.smallest_subnormal:
        return f"{number(value)} in FP32, below FP16's {number(FLOAT16.smallest_subnormal)}"
    return f"{number(value)} in FP32"


# What it costs


def _costs(cost: PinCost | None) -> tuple[str, str]:
    return (share(cost.flops), share(cost.activations)) if cost is not None else ("-", "-")


def cost_sentence(cost: PinCost) -> str:
    """What the whole set takes out of FP16."""
    return (
        f"The set takes {share(cost.flops)} of the forward pass's FLOPs and {share(cost.activations)} of its "
        f"FP16 activations ({byte_size(cost.activation_bytes)}) out of FP16."
    )


# What to paste


def pins_yaml(names: Sequence[str], config: Mapping[str, object]) -> list[str]:
    """The lines of a config that pin ``names``, beside the pins that ``config`` has already.

    The whole model, which has no name, is the pattern that every name matches.
    """
    precision = config.get("precision")
    already = precision.get("pins") if isinstance(precision, Mapping) else None
    given = [str(name) for name in already] if isinstance(already, (list, tuple)) else []
    every = list(dict.fromkeys([*given, *(name or EVERYTHING for name in names)]))
    lines = yaml.safe_dump(every, default_flow_style=False, width=math.inf).splitlines() if every else []
    return ["precision:", "  pins:", *(f"    {text}" for text in lines)]


def config_lines(names: Sequence[str], config: Mapping[str, object]) -> Snippet:
    """The lines to paste."""
    return Snippet("In the config", tuple(pins_yaml(names, config)))


# What proves it


def proof_table(proof: Proof) -> Table:
    """Each thing that was run, and how it came out."""
    rows = (
        (line(Words("✓", "good") if step.passed else Words("✗", "bad")), step.name, step.detail) for step in proof.steps
    )
    return Table("The proof", PROOF_COLUMNS, tuple(rows))
