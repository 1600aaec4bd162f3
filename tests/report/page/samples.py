"""Large and hostile records for the HTML page, and the contents of a page."""

import base64
import gzip
import json
import random
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from ampdbg.formats import Exponents, headroom_bits, scale_ceiling, scale_floor
from ampdbg.record.findings import Finding, Listing, Source
from ampdbg.record.pins import FileDiff, Handover, PatchUnit, Pin, PinCost, Proof, ProofStep, Search, Trial
from ampdbg.record.run import Record, Site
from ampdbg.report.formats import written
from ampdbg.report.view import CommandContext, Look
from tests.report.records import run, skipped_step

HOSTILE = (
    "</script><script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    "'\"><svg onload=document.title='owned'>",
    "{{ 7 * 7 }}{% raw %}",
    "[bold red]markup[/]",
    "\x1b[31mred\x1b[0m",
    "\u202egnp.exe",
    "🦆💥 Ünïcode",
    "a & b &amp; c",
    "<!-- ]]> --",
)
"""Names that may come from a user's code, files or data."""


def html(record: Record, folder: str = "/home/me") -> str:
    return written(
        record, CommandContext("config.yaml", ".ampdbg/r.json", folder), Look(80, color=False, unicode=True), "html"
    )


def unpacked(page: str, name: str) -> bytes:
    found = re.search(rf'<script type="application/octet-stream" id="{name}">([A-Za-z0-9+/=]*)</script>', page)
    assert found, f"the page holds no {name}"
    return gzip.decompress(base64.b64decode(found[1]))


def data_of(page: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(unpacked(page, "data"))
    return data


class Parsed(HTMLParser):
    """A page as a browser reads it: its tags, its attributes and its visible text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self._hidden = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        self._hidden = tag if tag in ("script", "style") else self._hidden

    def handle_endtag(self, tag: str) -> None:
        self._hidden = "" if tag == self._hidden else self._hidden

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.text += data


def site(order: int, phase: str, module: str, exponents: Exponents, source: Source, **fields: Any) -> Site:
    """A site as a range profile measures it, from the spread of its values."""
    largest = 1.5 * 2.0 ** (exponents.lowest + len(exponents.counts) - 1)
    measured = Site(
        "forward", module, "aten.mm.default", source, "float16", order, calls=1, call=0, size=sum(exponents.counts),
        inf=0, nan=0, abs_max=largest, headroom_bits=round(headroom_bits(largest), 2),
        lowest_exponent=exponents.lowest, exponents=exponents.counts,
    )  # fmt: skip
    if phase == "forward":
        return replace(measured, overflow="starts" if largest >= 65520 else "", **fields)
    ceiling, floor = scale_ceiling(largest), scale_floor(exponents)
    return replace(measured, phase="backward", scale_ceiling=ceiling, scale_floor=floor, **fields)


def large(sites: int, modules: int) -> Record:
    """A range profile of a large model: as many forward as backward sites, with a realistic spread."""
    dice = random.Random(7)
    names = [f"model.layers.{number // 8}.block{number % 8}.projection" for number in range(modules)]
    lines = tuple(f"    hidden = self.projection_{number}(hidden) * self.scale" for number in range(300))
    measured = []
    for order in range(sites):
        is_gradient = order >= sites // 2
        top = dice.randint(-14, 2) if is_gradient else dice.randint(-2, 15)
        counts = tuple(int(4096 * 2.0 ** -abs(dice.gauss(0, 3))) for _ in range(dice.randint(12, 30)))
        name = names[(sites - 1 - order if is_gradient else order) * modules // sites * 2 % modules]
        number = dice.randrange(300)
        source = Source(f"/home/me/model_{order % 5}.py", number + 1, "forward", lines[number].strip())
        spread = Exponents(top - len(counts) + 1, (*counts[:-1], 1))
        measured.append(site(order, "backward" if is_gradient else "forward", name, spread, source))
    listings = tuple(Listing(f"/home/me/model_{number}.py", 1, lines) for number in range(5))
    return run([], command="ranges", sites=tuple(measured), listings=listings, planned_steps=1, groups=())


def hostile() -> Record:
    """A record in which every text from the user is one of :data:`HOSTILE`."""
    sources = [Source(f"/home/me/{text}.py", 3, text, f"x = {text}") for text in HOSTILE]
    findings = tuple(
        Finding("forward-overflow", "error", 1, "forward", f"message {text}", f"remedy {text}", text, text, text, line)
        for text, line in zip(HOSTILE, sources, strict=True)
    )
    sites = tuple(
        site(at, ("backward", "forward")[at % 2], text, Exponents(-20, (4, 9, 2)), line, op=f"aten.{text}.default")
        for at, (text, line) in enumerate(zip(HOSTILE, sources, strict=True))
    )
    listings = tuple(Listing(one.file, 1, (text, text, one.text)) for one, text in zip(sources, HOSTILE, strict=True))
    diff = "--- a/x.py\n+++ b/x.py\n" + "".join(f"+{text}\n" for text in HOSTILE)
    units = tuple(PatchUnit(text, (text,), (text,)) for text in HOSTILE)
    files = (FileDiff(HOSTILE[0], "utf-8", diff),)
    return run(
        [skipped_step(1, 65536.0, ())], command="suggest-fp32", verdict="precision", sites=sites, findings=findings,
        listings=listings, groups=tuple(f"{text}.weight" for text in HOSTILE),
        pins=tuple(Pin(text, cost=PinCost(0.1, 0.2, 300), class_name=text) for text in HOSTILE),
        trials=tuple(Trial((text,), False, f"why {text}", text) for text in HOSTILE),
        search=Search("guided", "found", message=HOSTILE[0]),
        handover=Handover("diff", HOSTILE, folder=f"/home/me/{HOSTILE[0]}", files=files, units=units, notes=HOSTILE),
        verification=Proof(True, tuple(ProofStep(text, True, text) for text in HOSTILE)),
        config={"model": {"target": HOSTILE[0], "args": {HOSTILE[1]: list(HOSTILE)}}}, error="",
    )  # fmt: skip


def write_page(record: Record, file: Path) -> Path:
    file.write_text(html(record), encoding="utf-8")
    return file
