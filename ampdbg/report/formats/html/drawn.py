"""What the page's script draws, as plain data: a timeline, a range map, a tree of modules, the code."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ampdbg.diagnosis.producers import op_name
from ampdbg.diagnosis.ranges import Window, window
from ampdbg.escapes import harmless
from ampdbg.formats import FLOAT16, headroom_bits
from ampdbg.levels import precision_of
from ampdbg.quantities import number, scale, share
from ampdbg.record.findings import Listing
from ampdbg.record.listings import sources_of
from ampdbg.record.pins import Pin
from ampdbg.record.run import Producer, Record, Site, Step

Data = dict[str, Any]
"""Plain data, ready for JSON."""

BELOW_ALL, ABOVE_ALL = -9999, 9999
"""A floor or ceiling below every loss scale that can be tried, and one above all of them."""

LEVELS_PER_BIT = 12
"""A share of a site's values is one byte: 255 is all of them, each level less a twelfth of a halving, 0 is none."""

LOWEST_SCALE, HIGHEST_SCALE = -40, 60
"""The loss scales that can be tried, as powers of two; as many of them as are of use."""


FIRST_SCALE = 16
"""Where a record does not hold the run's: GradScaler begins with 2**16."""


MOST_OF_A_STRETCH = 8
"""Steps are left out of a long run so that each stretch keeps at most so many."""


@dataclass(frozen=True)
class Detail:
    """How much of a record a page shows; ``rows`` of tables and texts, ``lines`` of code, ``characters`` of a line."""

    sites: int
    modules: int
    steps: int
    findings: int
    rows: int
    lines: int
    characters: int


class TextTable:
    """The texts of the user's world, each kept once; data refers to them by number."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        """Its place in the list."""
        return self._numbers.setdefault(text, len(self._numbers))

    def shown(self, folder: str, most: int) -> list[str]:
        """All of them, harmless; files below ``folder`` are named from there."""
        return [clipped(text, most) for text in harmless(tuple(self._numbers), folder)]


def clipped(text: str, most: int) -> str:
    """The text, or its beginning and how much of it is left out."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text) - most:,} more characters in the record)"


def timeline(record: Record, detail: Detail) -> Data | None:
    """Loss, loss scale and gradient norm by step; None where no step has ended.

    Of more steps than there is room for, each stretch keeps its first and last, its extremes and its worst.
    """
    steps = _thinned(record.steps, detail.steps)
    if not steps:
        return None
    return {
        "step": [one.step for one in steps],
        "skipped": [int(one.skipped) for one in steps],
        "series": [
            _series("loss", "Loss", steps, lambda step: step.loss, number),
            _series("scale", "Loss scale", steps, lambda step: step.scale, scale),
            _series("norm", "Gradient norm", steps, lambda step: step.grad_norm, number),
        ],
        "shown": len(steps),
        "ran": record.steps_run,
        "kept": len(record.steps),
        "findings": [
            [one.step, clipped(harmless(one.code), detail.characters)] for one in record.findings[: detail.findings]
        ],
    }


def _series(
    name: str, title: str, steps: Sequence[Step], of: Callable[[Step], float | None], words: Callable[[float], str]
) -> Data:
    values = [of(step) for step in steps]
    return {
        "name": name,
        "title": title,
        "values": [value if value is not None and math.isfinite(value) else None for value in values],
        "words": ["-" if value is None else words(value) for value in values],
    }


def _thinned(steps: Sequence[Step], most: int) -> list[Step]:
    if len(steps) <= most:
        return list(steps)
    size = math.ceil(len(steps) * MOST_OF_A_STRETCH / most)
    stretches = (range(start, min(start + size, len(steps))) for start in range(0, len(steps), size))
    return [steps[at] for stretch in stretches for at in sorted(_telling(steps, stretch))]


def _telling(steps: Sequence[Step], stretch: range) -> set[int]:
    """Of a stretch of steps its ends, its extremes, and the first that was skipped or lost its loss."""
    kept = [stretch[0], stretch[-1]]
    losses = [(steps[at].loss, at) for at in stretch if math.isfinite(steps[at].loss)]
    norms = [(norm, at) for at in stretch if (norm := steps[at].grad_norm) is not None and math.isfinite(norm)]
    kept += [end(values)[1] for values in (losses, norms) if values for end in (min, max)]
    kept += [at for at in stretch if steps[at].skipped][:1]
    kept += [at for at in stretch if not math.isfinite(steps[at].loss)][:1]
    return set(kept)


@dataclass(frozen=True)
class RangeMap:
    """The sites as columns, and of each how its values are spread over the exponents, a byte for each."""

    columns: Data
    levels: bytes


def range_map(record: Record, names: TextTable, detail: Detail) -> RangeMap:
    """The sites in order of execution; of too many those that are nearest to a limit."""
    whole = window(record.sites)
    shown = sorted(_nearest(record.sites, whole, detail.sites), key=lambda site: site.order)
    places = {id(site): at for at, site in enumerate(shown)}
    columns: Data = {
        "phase": "".join("f" if site.phase == "forward" else "b" for site in shown),
        "module": [names.number(site.module) for site in shown],
        "op": [names.number(op_name(site.op)) for site in shown],
        "file": [names.number(site.source.file) if site.source else -1 for site in shown],
        "line": [site.source.line if site.source else 0 for site in shown],
        "bits": [headroom_of(site) for site in shown],
        "max": [number(site.abs_max) for site in shown],
        "overflow": ["-" if not site.overflow else site.overflow[0] for site in shown],
        "ceiling": [ceiling_of(site) for site in shown],
        "floor": [floor_of(site) for site in shown],
        "calls": [site.calls for site in shown],
        "call": [site.call for site in shown],
        "size": [f"{site.size:,}" for site in shown],
        "bad": [
            " and ".join([f"{one.inf:,} inf"] * bool(one.inf) + [f"{one.nan:,} NaN"] * bool(one.nan)) for one in shown
        ],
        "lowest": [site.lowest_exponent for site in shown],
        "counts": [len(site.exponents) for site in shown],
        "every": len(record.sites),
        "scales": _scales(record, whole),
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
    return RangeMap(columns, b"".join(map(_levels, shown)))


def _nearest(sites: Sequence[Site], whole: Window, most: int) -> Iterable[Site]:
    if len(sites) <= most:
        return sites
    bounds = [site for site in (whole.lowest_ceiling, whole.highest_floor) if site is not None]
    gradients = [site for site in sites if site.phase == "backward"]
    kept = {id(site): site for site in bounds}
    for ranked in (
        sorted(sites, key=lambda site: (headroom_of(site) is None, headroom_of(site)))[: most // 2],
        sorted(gradients, key=ceiling_of)[: most // 4],
        sorted(gradients, key=lambda site: -floor_of(site))[: most // 4 - len(bounds)],
    ):
        kept |= {id(site): site for site in ranked}
    return kept.values()


def _scales(record: Record, whole: Window) -> Data:
    """What every loss scale that can be tried does to the gradients: how many sites overflow, and how many are lost."""
    gradients = [site for site in record.sites if site.phase == "backward"]
    ends = [end for end in (power_of(whole.floor), power_of(whole.ceiling)) if abs(end) < ABOVE_ALL]
    of_run = _scale_of_run(record)
    low = max(LOWEST_SCALE, min(0, *(end - 4 for end in ends), of_run))
    high = min(HIGHEST_SCALE, max(20, *(end + 4 for end in ends), of_run))
    powers = range(low, high + 1)
    ceilings, floors = [ceiling_of(site) for site in gradients], [floor_of(site) for site in gradients]
    return {
        "low": low,
        "words": [scale(math.ldexp(1.0, power)) for power in powers],
        "overflow": [sum(ceiling < power for ceiling in ceilings) for power in powers],
        "lost": [sum(floor > power for floor in floors) for power in powers],
        "gradients": len(gradients),
        "of_run": min(max(of_run, low), high),
    }


def _scale_of_run(record: Record) -> int:
    """The exponent of the loss scale that the run ended with, else of the one that its config begins with."""
    given = precision_of(record.config).get("loss_scale")
    first = given.get("init") if isinstance(given, Mapping) else given
    last = record.steps[-1].scale if record.steps else first
    if isinstance(last, (int, float)) and math.isfinite(last) and last > 0:
        return round(math.log2(last))
    return FIRST_SCALE


def ceiling_of(site: Site) -> int:
    """The highest exponent of a loss scale at which nothing overflows."""
    return ABOVE_ALL if site.scale_ceiling is None else power_of(site.scale_ceiling)


def floor_of(site: Site) -> int:
    """The lowest exponent of a loss scale that keeps the gradient; one that is noise may be lost."""
    lost = site.scale_floor if not site.is_noise else None
    return BELOW_ALL if lost is None else power_of(lost)


def power_of(value: float) -> int:
    """The exponent of a loss scale, a power of two; 0 is below and inf above all that can be tried."""
    if math.isnan(value) or value <= 0.0:
        return BELOW_ALL
    return ABOVE_ALL if math.isinf(value) else math.frexp(value)[1] - 1


def headroom_of(site: Site) -> float | None:
    """Its headroom in bits: None where there is no end to it, and far below zero for inf and NaN."""
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
"""Modules are not nested any deeper in the tree, whatever dots their names have."""

TAB = 4

LineHeadroom = tuple[int, float, str]
"""A line, the headroom of what ran there in FP32, and that in words."""


@dataclass
class Node:
    """A module with all below it: the worst headroom of its forward pass, the loss scales that suit its gradients."""

    name: str
    depth: int
    inside: list[Node] = field(default_factory=list)
    sites: int = 0
    headroom: float | None = None
    ceiling: int = ABOVE_ALL
    floor: int = BELOW_ALL
    findings: list[int] = field(default_factory=list)
    pins: list[Pin] = field(default_factory=list)

    def take(self, site: Site) -> None:
        self.sites += 1
        bits = headroom_of(site)
        if site.phase == "forward" and bits is not None:
            self.headroom = bits if self.headroom is None else min(bits, self.headroom)
        self.ceiling, self.floor = min(self.ceiling, ceiling_of(site)), max(self.floor, floor_of(site))

    def walked(self) -> Iterator[Node]:
        """It, and all below it in the order in which they were met."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.inside))


class Modules:
    """The tree of the modules that a record names."""

    def __init__(self) -> None:
        self.root = Node("", 0)
        self._nodes = {"": self.root}

    def around(self, name: str) -> list[Node]:
        """The module and those that hold it, the outermost first."""
        line, parts = [self.root], name.split(".") if name else []
        around = [".".join(parts[:count]) for count in range(1, min(len(parts), MOST_DEPTH))]
        for inner in (*around, *[name] * bool(name)):
            if inner not in self._nodes:
                self._nodes[inner] = Node(inner, len(line))
                line[-1].inside.append(self._nodes[inner])
            line.append(self._nodes[inner])
        return line


def module_tree(record: Record, names: TextTable, detail: Detail) -> Data:
    """The modules as columns, each behind the one that holds it; of too many those with the least room are kept."""
    modules = Modules()
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
    every = list(modules.root.walked())
    shown = _worst(every, modules, detail.modules)
    return {
        "name": [names.number(node.name) for node in shown],
        "depth": [node.depth for node in shown],
        "sites": [node.sites for node in shown],
        "bits": [node.headroom for node in shown],
        "floor": [node.floor for node in shown],
        "ceiling": [node.ceiling for node in shown],
        "from": [_scale(node.floor, "any") for node in shown],
        "to": [_scale(node.ceiling, "0") for node in shown],
        "findings": [node.findings for node in shown],
        "pin": [", ".join(map(_pinned, node.pins)) for node in shown],
        "every": len(every),
    }


def _worst(every: Sequence[Node], modules: Modules, most: int) -> list[Node]:
    if len(every) <= most:
        return list(every)

    def rank(node: Node) -> tuple[bool, bool, float]:
        return not node.findings, not node.pins, math.inf if node.headroom is None else node.headroom

    kept: dict[int, Node] = {}
    for node in sorted(every, key=rank):
        line = {id(one): one for one in modules.around(node.name)}
        if len(kept | line) > most:
            break
        kept |= line
    return [node for node in every if id(node) in kept]


def _scale(power: int, nothing: str) -> str:
    if abs(power) < ABOVE_ALL:
        return scale(math.ldexp(1.0, power))
    return nothing if power == BELOW_ALL else "any"


def _pinned(pin: Pin) -> str:
    what, cost = "own lines" if pin.own else "pin", pin.cost
    return f"{what}: {share(cost.flops)} of FLOPs, {share(cost.activations)} of activations" if cost else what


def listings(record: Record, names: TextTable, folder: str, detail: Detail) -> list[Data]:
    """The files that the record names, each in the pieces that it has: of records without listings single lines.

    ``seen`` is what the replays saw on their lines; ``left_out`` counts lines for which there is no room.
    """
    files: dict[str, list[Listing]] = {}
    for listing in record.listings:
        files.setdefault(listing.file, []).append(listing)
    for source in sources_of(record):
        pieces = files.setdefault(source.file, [])
        if source.line and not any(0 <= source.line - one.first < len(one.lines) for one in pieces):
            pieces.append(Listing(source.file, source.line, (source.text,)))
    room, seen = detail.lines, _seen(record)
    shown: list[Data] = []
    for file, pieces in files.items():
        kept = list(_within(sorted(pieces, key=lambda one: one.first), room))
        count = sum(len(one.lines) for one in kept)
        room -= count
        shown.append(
            {
                "file": names.number(file),
                "pieces": [[one.first, _texts(one.lines, folder, detail)] for one in kept],
                "left_out": sum(len(one.lines) for one in pieces) - count,
                "seen": seen.get(file, [])[: detail.rows],
            }
        )
    return shown


def _within(pieces: Iterable[Listing], room: int) -> Iterator[Listing]:
    for piece in pieces:
        if room > 0:
            yield Listing(piece.file, piece.first, piece.lines[:room])
        room -= len(piece.lines)


def _texts(lines: tuple[str, ...], folder: str, detail: Detail) -> list[str]:
    expanded = harmless(tuple(line.expandtabs(TAB) for line in lines), folder)
    return [clipped(text, detail.characters) for text in expanded]


def _seen(record: Record) -> dict[str, list[LineHeadroom]]:
    """What the replays saw overflow, by file: each op of a line once, with the least room."""
    producers = (one for made in record.investigations for replay in made.replays for one in replay.producers)
    largest: dict[tuple[str, int, str], tuple[float, Producer]] = {}
    for one in producers:
        if one.source is not None and one.fp32_largest is not None:
            key, size = (one.source.file, one.source.line, one.op), one.fp32_largest
            largest[key] = max(largest.get(key, (size, one)), (size, one), key=lambda made: made[0])
    seen: dict[str, list[LineHeadroom]] = {}
    for (file, line, op), (size, one) in largest.items():
        words = harmless(f"{op_name(op)}{f' in {one.module}' * bool(one.module)}: {number(size)} in FP32")
        if math.isfinite(bits := headroom_bits(size)):
            seen.setdefault(file, []).append((line, round(bits, 2), words))
    return seen
