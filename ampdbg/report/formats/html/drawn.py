"""Plain data for the page's script to draw: a timeline, a range map, a tree of modules, the code."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ampdbg.diagnosis.producers import op_name
from ampdbg.diagnosis.ranges import Window, window
from ampdbg.escapes import harmless
from ampdbg.formats import FLOAT16, headroom_bits
from ampdbg.levels import precision_of
from ampdbg.quantities import in_module, number, scale, share
from ampdbg.record.findings import Listing, Source
from ampdbg.record.listings import sources_of
from ampdbg.record.pins import Pin
from ampdbg.record.run import Producer, Record, Site, Step

Data = dict[str, Any]
"""Plain data, ready for JSON."""

MOST_SITES, MOST_MODULES, MOST_STEPS = 20_000, 4_000, 4_000
MOST_FINDINGS, MOST_ROWS, MOST_CHARACTERS = 100, 300, 1_000
"""The most of a record that is shown. A page has at most 12 MB, which browsers open at once and issue trackers take."""

BELOW_ALL, ABOVE_ALL = -9999, 9999
"""A floor below, and a ceiling above, every loss scale that can be tried."""

LEVELS_PER_BIT = 12
"""The resolution of a share of a site's values in one byte: 255 is all, 0 is none, 12 levels are a halving."""

LOWEST_SCALE, HIGHEST_SCALE = -40, 60
"""The lowest and highest loss scale that the page can try, as powers of two; others are of no use."""

FIRST_SCALE = 16
"""The loss scale if the record does not have the run's: GradScaler begins with 2**16."""


class TextTable(dict[str, int]):
    """The texts from the user, each kept once; data refers to them by number."""

    def __missing__(self, text: str) -> int:
        self[text] = len(self)
        return self[text]


def line_at(source: Source | None, names: TextTable) -> tuple[int, int]:
    """Return the number of a line's file, and the line; -1 and 0 if none is known."""
    return (names[source.file], source.line) if source is not None else (-1, 0)


def clipped(text: str) -> str:
    """Return the text, or its beginning and the number of characters left out."""
    left = len(text) - MOST_CHARACTERS
    return text if left <= 0 else f"{text[:MOST_CHARACTERS]}… ({left:,} more characters in the record)"


def timeline(record: Record) -> Data | None:
    """Return loss, loss scale and gradient norm by step; None if no step has ended.

    If any step has a scaler, only such steps show a loss scale. A scale of 1 without a scaler is left out.
    """
    steps, has_scaler = _thinned(record.steps), any(step.scaler for step in record.steps)
    if not steps:
        return None
    scales = [step.scale if step.scaler or not has_scaler else None for step in steps]
    curves = [_series("loss", "Loss", [step.loss for step in steps], number)]
    if has_scaler or any(step.scale != 1.0 for step in steps):
        curves.append(_series("scale", "Loss scale", scales, scale))
    curves.append(_series("norm", "Gradient norm", [step.grad_norm for step in steps], number))
    return {
        "step": [one.step for one in steps],
        "skipped": [int(one.skipped) for one in steps],
        "series": curves,
        "shown": len(steps),
        "ran": record.steps_run,
        "kept": len(record.steps),
        "findings": [[one.step, clipped(harmless(one.code))] for one in record.findings[:MOST_FINDINGS]],
    }


def _series(name: str, title: str, values: Sequence[float | None], words: Callable[[float], str]) -> Data:
    return {
        "name": name,
        "title": title,
        "values": list(map(_finite, values)),
        "words": ["-" if value is None else words(value) for value in values],
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _thinned(steps: Sequence[Step]) -> list[Step]:
    """Return the steps; if there are too many, each stretch keeps the first by each of :data:`RANKS`."""
    size = math.ceil(len(steps) * len(RANKS) / MOST_STEPS) if len(steps) > MOST_STEPS else 1
    stretches = (steps[start : start + size] for start in range(0, len(steps), size))
    kept = {id(min(stretch, key=rank)) for stretch in stretches for rank in RANKS}
    return [step for step in steps if id(step) in kept]


def _extreme(value: float | None, sign: int) -> tuple[bool, float]:
    """Return a sort key whose minimum is the least finite value, or with a sign of -1 the largest."""
    finite = _finite(value)
    return finite is None, sign * (finite or 0.0)


RANKS: tuple[Callable[[Step], Any], ...] = (
    lambda step: step.step,
    lambda step: -step.step,
    lambda step: not step.skipped,
    lambda step: math.isfinite(step.loss),
    lambda step: _extreme(step.loss, 1),
    lambda step: _extreme(step.loss, -1),
    lambda step: _extreme(step.grad_norm, 1),
    lambda step: _extreme(step.grad_norm, -1),
)
"""The ways a step stands out in a stretch: its ends, its extremes, the first skipped, the first non-finite loss."""


def range_map(record: Record, names: TextTable) -> tuple[Data, bytes]:
    """Return the sites in order of execution as columns, and their values' exponents, a byte for each.

    Of too many sites those nearest to a limit are shown.
    """
    whole, of_run = window(record.sites), _scale_of_run(record)
    bounds = {id(whole.highest_floor), id(whole.lowest_ceiling)}
    nearest = sorted(record.sites, key=lambda site: (id(site) not in bounds, _room(site, of_run)))[:MOST_SITES]
    shown = sorted(nearest, key=lambda site: site.order)
    places = {id(site): at for at, site in enumerate(shown)}
    at_lines = [line_at(site.source, names) for site in shown]
    columns: Data = {
        "phase": "".join("f" if site.phase == "forward" else "b" for site in shown),
        "module": [names[site.module] for site in shown],
        "op": [names[op_name(site.op)] for site in shown],
        "file": [file for file, _ in at_lines],
        "line": [line for _, line in at_lines],
        "bits": [headroom_of(site) for site in shown],
        "max": [number(site.abs_max) for site in shown],
        "overflow": ["-" if not site.overflow else site.overflow[0] for site in shown],
        "ceiling": [power_of(site.ceiling) for site in shown],
        "floor": [power_of(site.floor) for site in shown],
        "calls": [site.calls for site in shown],
        "call": [site.call for site in shown],
        "size": [f"{site.size:,}" for site in shown],
        "bad": [
            " and ".join([f"{one.inf:,} inf"] * bool(one.inf) + [f"{one.nan:,} NaN"] * bool(one.nan)) for one in shown
        ],
        "lowest": [site.lowest_exponent for site in shown],
        "counts": [len(site.exponents) for site in shown],
        "every": len(record.sites),
        "scales": _scales(record, whole, of_run),
        "window": {
            "floor": power_of(whole.floor),
            "ceiling": power_of(whole.ceiling),
            "low": places.get(id(whole.highest_floor), -1),
            "high": places.get(id(whole.lowest_ceiling), -1),
        },
        "limits": {
            "overflow": FLOAT16.max_exponent + 1,
            "normal": FLOAT16.min_exponent,
            "least": FLOAT16.min_exponent - FLOAT16.precision + 1,
        },
        "per_bit": LEVELS_PER_BIT,
    }
    return columns, b"".join(map(_levels, shown))


def _scales(record: Record, whole: Window, of_run: int) -> Data:
    """Return how many gradient sites overflow, and how many are lost, at each loss scale that can be tried."""
    gradients = [site for site in record.sites if site.phase == "backward"]
    ends = [end for end in (power_of(whole.floor), power_of(whole.ceiling)) if abs(end) < ABOVE_ALL]
    low = max(LOWEST_SCALE, min(0, *(end - 4 for end in ends), of_run))
    high = min(HIGHEST_SCALE, max(20, *(end + 4 for end in ends), of_run))
    powers = range(low, high + 1)
    ceilings, floors = [power_of(site.ceiling) for site in gradients], [power_of(site.floor) for site in gradients]
    return {
        "low": low,
        "words": [scale(math.ldexp(1.0, power)) for power in powers],
        "overflow": [sum(ceiling < power for ceiling in ceilings) for power in powers],
        "lost": [sum(floor > power for floor in floors) for power in powers],
        "gradients": len(gradients),
        "of_run": min(max(of_run, low), high),
    }


def _scale_of_run(record: Record) -> int:
    """Return the exponent of the loss scale that the run ended with, else of the first scale in its config."""
    given = precision_of(record.config).get("loss_scale")
    first = given.get("init") if isinstance(given, Mapping) else given
    last = record.scaled_steps[-1].scale if record.steps else first
    power = power_of(last) if isinstance(last, (int, float)) else ABOVE_ALL
    return power if abs(power) < ABOVE_ALL else FIRST_SCALE


def _room(site: Site, at: int) -> float:
    """Return the powers of two up to FP16's limit; for a gradient to the nearer limit, at a loss scale of 2**``at``."""
    if site.phase == "backward":
        return min(power_of(site.ceiling) - at, at - power_of(site.floor))
    return math.inf if (bits := headroom_of(site)) is None else bits


def power_of(value: float) -> int:
    """Return the exponent of a loss scale, a power of two; 0 is below and inf above all that can be tried."""
    if math.isnan(value) or value <= 0.0:
        return BELOW_ALL
    return ABOVE_ALL if math.isinf(value) else math.frexp(value)[1] - 1


def headroom_of(site: Site) -> float | None:
    """Return the headroom in bits: None if it is unlimited, and far below zero for inf and NaN."""
    bits = site.headroom_bits
    if math.isnan(bits) or bits == -math.inf:
        return float(BELOW_ALL)
    return None if math.isinf(bits) else bits


def _levels(site: Site) -> bytes:
    total = sum(site.exponents)
    return bytes(
        max(1, min(255, round(255 + LEVELS_PER_BIT * math.log2(count / total)))) if count else 0
        for count in site.exponents
    )


MOST_DEPTH = 32
"""The deepest level of the tree of modules, for any number of dots in their names."""

TAB = 4

LineHeadroom = tuple[int, float, str]
"""A line, the headroom of the FP32 value there, and the value in words."""


@dataclass
class Node:
    """A module with everything below it: its worst forward headroom, and the loss scales that suit its gradients."""

    name: str
    depth: int
    place: int
    sites: int = 0
    headroom: float = math.inf
    ceiling: int = ABOVE_ALL
    floor: int = BELOW_ALL
    findings: list[int] = field(default_factory=list)
    pins: list[Pin] = field(default_factory=list)

    def take(self, site: Site) -> None:
        self.sites += 1
        if site.phase == "forward":
            self.headroom = min(self.headroom, _room(site, 0))
        self.ceiling = min(self.ceiling, power_of(site.ceiling))
        self.floor = max(self.floor, power_of(site.floor))


class Modules(dict[str, Node]):
    """The modules that a record names, and the modules around them."""

    def around(self, name: str) -> list[Node]:
        """Return the module and the modules around it, the outermost first."""
        parts = name.split(".")
        holders = (".".join(parts[:count]) for count in range(1, min(len(parts), MOST_DEPTH)))
        line = dict.fromkeys(("", *holders, name))
        return [self.setdefault(one, Node(one, depth, len(self))) for depth, one in enumerate(line)]


def module_tree(record: Record, names: TextTable) -> Data:
    """Return the modules as columns, each after the module around it; of too many the outermost are kept."""
    modules = Modules()
    modules.around("")
    for site in record.sites:
        for node in modules.around(site.module):
            node.take(site)
    for at, finding in enumerate(record.findings):
        if finding.module:
            modules.around(finding.module)[-1].findings.append(at)
    for pin in record.pins:
        if pin.source is None:
            modules.around(pin.module)[-1].pins.append(pin)
    for group in record.groups if record.sites else ():
        modules.around(group.rpartition(".")[0])
    outermost = sorted(modules.values(), key=lambda node: node.depth)[:MOST_MODULES]
    shown = sorted(outermost, key=lambda node: [one.place for one in modules.around(node.name)])
    return {
        "name": [names[node.name] for node in shown],
        "depth": [node.depth for node in shown],
        "sites": [node.sites for node in shown],
        "bits": [node.headroom if math.isfinite(node.headroom) else None for node in shown],
        "floor": [node.floor for node in shown],
        "ceiling": [node.ceiling for node in shown],
        "from": [_scale(node.floor, "any") for node in shown],
        "to": [_scale(node.ceiling, "0") for node in shown],
        "findings": [node.findings for node in shown],
        "pin": [", ".join(map(_pinned, node.pins)) for node in shown],
        "every": len(modules),
    }


def _scale(power: int, nothing: str) -> str:
    if abs(power) < ABOVE_ALL:
        return scale(math.ldexp(1.0, power))
    return nothing if power == BELOW_ALL else "any"


def _pinned(pin: Pin) -> str:
    what, cost = "own lines" if pin.own else "pin", pin.cost
    return f"{what}: {share(cost.flops)} of FLOPs, {share(cost.activations)} of activations" if cost else what


def listings(record: Record, names: TextTable, folder: str) -> list[Data]:
    """Return the files that the record names, each in the pieces that it has; without listings single lines.

    ``seen`` is what the replays saw on their lines.
    """
    files: dict[str, list[Listing]] = {}
    for listing in record.listings:
        files.setdefault(listing.file, []).append(listing)
    for source in sources_of(record):
        pieces = files.setdefault(source.file, [])
        if source.line and not any(0 <= source.line - one.first < len(one.lines) for one in pieces):
            pieces.append(Listing(source.file, source.line, (source.text,)))
    seen = _seen(record)
    return [
        {
            "file": names[file],
            "pieces": [[one.first, _texts(one.lines, folder)] for one in sorted(pieces, key=lambda one: one.first)],
            "seen": seen.get(file, [])[:MOST_ROWS],
        }
        for file, pieces in files.items()
    ]


def _texts(lines: Iterable[str], folder: str) -> list[str]:
    expanded = harmless(tuple(line.expandtabs(TAB) for line in lines), folder)
    return [clipped(text) for text in expanded]


def _seen(record: Record) -> dict[str, list[LineHeadroom]]:
    """Return the overflows that the replays saw, by file: each op of a line once, with the least room."""
    producers = (one for made in record.investigations for replay in made.replays for one in replay.producers)
    largest: dict[tuple[str, int, str], tuple[float, Producer]] = {}
    for one in producers:
        if one.source is not None and one.fp32_largest is not None:
            key, size = (one.source.file, one.source.line, one.op), one.fp32_largest
            largest[key] = max(largest.get(key, (size, one)), (size, one), key=lambda made: made[0])
    seen: dict[str, list[LineHeadroom]] = {}
    for (file, line, op), (size, one) in largest.items():
        words = harmless(f"{op_name(op)}{in_module(one.module)}: {number(size)} in FP32")
        if math.isfinite(bits := headroom_bits(size)):
            seen.setdefault(file, []).append((line, round(bits, 2), words))
    return seen
