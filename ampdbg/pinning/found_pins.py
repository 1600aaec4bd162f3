"""The pins of a set that was found, as the record keeps them."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from ampdbg.record.findings import Finding
from ampdbg.record.pins import OWN, Pin, PinSite
from ampdbg.search import AtomTree
from ampdbg.source.ownership import is_library_class, is_users_file


def described(model: torch.nn.Module, name: str, tree: AtomTree) -> Pin:
    """The pin of this name, with its module's class."""
    module = name.removesuffix(OWN)
    kind = type(model.get_submodule(module))
    return Pin(module, own=name.endswith(OWN), class_name=kind.__name__, is_library=is_library_class(kind))


def statements(sites: Iterable[PinSite]) -> tuple[Pin, ...]:
    """Pins of the lines that belong to no module, each once."""
    lines = {site.source: site for site in sites if site.source is not None}
    return tuple(Pin("", source=source, sites=(site,), reason=0) for source, site in lines.items())


def reason_of(pin: Pin, findings: Sequence[Finding]) -> int | None:
    """The index of the finding in the pin's module, or of the root finding."""
    same = (index for index, finding in enumerate(findings) if finding.op and finding.module == pin.module)
    return next(same, 0 if findings else None)


def classes_of(model: torch.nn.Module, pins: Iterable[str], ran: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """How many instances of each pinned class are pinned, and how many ran, where there are several."""
    every = Counter(type(model.get_submodule(name)).__name__ for name in ran)
    pinned = Counter(type(model.get_submodule(pin.removesuffix(OWN))).__name__ for pin in pins)
    return {name: (count, every[name]) for name, count in pinned.items() if every[name] > 1}


def digests(pins: Iterable[Pin]) -> dict[str, str]:
    """The SHA-256 of each of the user's files that a line of the pins stands in."""
    files = {site.source.file for pin in pins for site in pin.sites if site.source is not None}
    return {file: digest(file) for file in sorted(files) if is_users_file(file)}


def digest(file: str) -> str:
    """The SHA-256 of a file; "" where it cannot be read."""
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError:
        return ""
