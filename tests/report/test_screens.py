"""The screens of all commands that have one, at 80 and 140 columns, in colour too.

``init`` and ``schema`` print text that no width changes, and ``report`` the screen of the command whose record it has.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ampdbg.commands.explain import as_text
from ampdbg.diagnosis.comparison import Comparison
from ampdbg.lint import engine
from ampdbg.lint.settings import Settings
from ampdbg.machine.facts import Machine
from ampdbg.record.run import Record
from ampdbg.report import comparison, doctor, lint
from ampdbg.report.formats.text import draw, write
from ampdbg.report.view import Look, Typed
from tests.conftest import Golden
from tests.machine.test_judgments import CPU_TORCH
from tests.report.runs import record_of
from tests.report.test_cost import on_gpu

GOLDEN = Path(__file__).parent / "golden" / "screens"
LINTED = Path(__file__).parents[1] / "lint" / "fixtures" / "clip_before_unscale.in.py"
TO_COPY = r"  .*\bampdbg |Record: |All of it: |    "
"""Code and commands, which are never cut nor wrapped."""

ANSI = re.compile(r"\x1b\[[0-9;]*m")


def screen(record: Callable[[], Record]) -> Callable[[Look], str]:
    """The screen of a record, which is read when its test runs: --update-golden may have made it again."""

    def drawn(look: Look) -> str:
        made = record()
        return write(made, Typed("config.yaml", f".ampdbg/20250102T030405Z-{made.command}.json"), look)

    return drawn


def of_run(name: str) -> Callable[[Look], str]:
    return screen(lambda: record_of(name))


def linted(look: Look) -> str:
    found = engine.lint([str(LINTED)], Settings())
    findings = tuple(replace(one, path="train.py") for one in found.findings)
    return draw(lint.page(replace(found, findings=findings), "train.py", 0), look)


def compared(look: Look) -> str:
    now = record_of("ranges_overflow")
    calm = replace(now, findings=(), sites=tuple(replace(site, overflow="", headroom_bits=4.0) for site in now.sites))
    return draw(comparison.page(Comparison(calm, now, 1.0), "then.json", "now.json"), look, is_brief=True)


SCREENS: dict[str, Callable[[Look], str]] = {
    "scan": of_run("scan_forward_overflow"),
    "ranges": of_run("ranges_overflow"),
    "bisect": of_run("bisect_example"),
    "suggest-fp32": of_run("suggestion"),
    "replay": of_run("replay"),
    "lint": linted,
    "run": of_run("run"),
    "cost": of_run("cost"),
    "cost_gpu": screen(on_gpu),
    "compare": compared,
    "explain": lambda look: as_text("forward-overflow", look),
    "doctor": lambda look: draw(doctor.page(Machine(CPU_TORCH)), look),
}


@pytest.mark.parametrize("name", SCREENS)
@pytest.mark.parametrize("width", [80, 140])
def test_the_screen_is_its_golden_file_and_colour_adds_no_word(name: str, width: int, golden: Golden) -> None:
    plain = SCREENS[name](Look(width, color=False, unicode=True))
    colored = SCREENS[name](Look(width, color=True, unicode=True))
    golden(GOLDEN / f"{name}_{width}.txt", plain)
    golden(GOLDEN / f"{name}_{width}.ansi", colored)
    assert [line.rstrip() for line in ANSI.sub("", colored).splitlines()] == plain.splitlines()


@pytest.mark.parametrize("name", SCREENS)
@pytest.mark.parametrize("width", [60, 80, 140])
def test_it_fits_but_for_what_is_there_to_copy(name: str, width: int) -> None:
    lines = SCREENS[name](Look(width, color=False, unicode=True)).splitlines()
    assert [line for line in lines if len(line) > width and not re.match(TO_COPY, line)] == []


@pytest.mark.parametrize("name", SCREENS)
def test_a_stream_that_carries_ascii_alone_can_show_it(name: str) -> None:
    assert SCREENS[name](Look(80, color=False, unicode=False)).isascii()
