"""Where things went wrong, as plain data for the page's script: the tree of modules, and the code line by line."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from ampdbg.diagnosis.producers import op_name
from ampdbg.escapes import harmless
from ampdbg.formats import headroom_bits
from ampdbg.quantities import number, scale, share
from ampdbg.record.findings import Listing
from ampdbg.record.listings import sources_of
from ampdbg.record.pins import Pin
from ampdbg.record.replays import Producer
from ampdbg.record.run import Record, Site

from .charts import ABOVE_ALL, BELOW_ALL, Data, Detail, Names, ceiling_of, clipped, floor_of, headroom_of

MOST_DEPTH = 32
"""Modules are not nested any deeper in the tree, whatever dots their names have."""

TAB = 4

Seen = tuple[int, float, str]
"""A line, the headroom of what ran there in FP32, and that in words."""

# The tree of modules


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
        """Counts a site that stands in it."""
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
        line = [self.root]
        for inner in _line_of(name):
            if inner not in self._nodes:
                self._nodes[inner] = Node(inner, len(line))
                line[-1].inside.append(self._nodes[inner])
            line.append(self._nodes[inner])
        return line


def _line_of(name: str) -> list[str]:
    """``a.b.c`` stands in ``a`` and ``a.b``."""
    parts = name.split(".") if name else []
    around = [".".join(parts[:count]) for count in range(1, min(len(parts), MOST_DEPTH))]
    return [*around, name] if name else []


def module_tree(record: Record, names: Names, detail: Detail) -> Data:
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
    what = "own lines" if pin.own else "pin"
    if pin.cost is None:
        return what
    return f"{what}: {share(pin.cost.flops)} of FLOPs, {share(pin.cost.activations)} of activations"


# The code


def listings(record: Record, names: Names, folder: str, detail: Detail) -> list[Data]:
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


def _producers(record: Record) -> Iterator[Producer]:
    for seen in record.investigations:
        for replay in seen.replays:
            yield from replay.producers


def _seen(record: Record) -> dict[str, list[Seen]]:
    """What the replays saw overflow, by file: each op of a line once, with the least room."""
    largest: dict[tuple[str, int, str], tuple[float, Producer]] = {}
    for one in _producers(record):
        if one.source is not None and one.fp32_largest is not None:
            key = (one.source.file, one.source.line, one.op)
            if key not in largest or largest[key][0] < one.fp32_largest:
                largest[key] = (one.fp32_largest, one)
    seen: dict[str, list[Seen]] = {}
    for (file, line, op), (size, one) in largest.items():
        bits = headroom_bits(size)
        if math.isfinite(bits):
            where = f" in {one.module}" if one.module else ""
            words = harmless(f"{op_name(op)}{where}: {number(size)} in FP32")
            seen.setdefault(file, []).append((line, round(bits, 2), words))
    return seen
