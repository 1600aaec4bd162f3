"""Golden pages of runs and golden screens of other commands, in every look; ``pytest --update-golden`` draws them.

``init`` and ``schema`` print text independent of the width, and ``report`` the screen of the record's command.
"""

import functools
import re
import typing
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ampdbg.commands.explain import as_text
from ampdbg.diagnosis.comparison import Comparison
from ampdbg.diagnosis.diagnose import diagnose
from ampdbg.lint import engine
from ampdbg.lint.settings import Settings
from ampdbg.machine.facts import Machine
from ampdbg.record.pins import Outcome
from ampdbg.record.run import GroupOverflow, Record, Step, Verdict
from ampdbg.report import comparison, doctor, lint
from ampdbg.report.formats.text import draw, write
from ampdbg.report.view import CommandContext, Look
from tests.conftest import Golden
from tests.machine.test_judgments import CPU_TORCH
from tests.report.pages import rendered
from tests.report.runs import RUNS, keep, record_of
from tests.report.test_cost import ON_CPU, on_gpu
from tests.strategies import pins, records, searches, trials

GOLDEN = Path(__file__).parent / "golden"
LINTED = Path(__file__).parents[1] / "lint" / "fixtures" / "clip_before_unscale.in.py"
ANSI = re.compile(r"\x1b\[[0-9;]*m")
TO_COPY = re.compile(r" *(ampdbg |Record: |Details: )|    ")
"""Start of the lines that are never cut or wrapped: commands, paths, and code."""

LOOK = Look(80, color=False, unicode=True)

Screen = Callable[[Look], str]


def page(record: Callable[[], Record], *, verbose: bool) -> Screen:
    """The page of a record. The record is read when the test runs, because --update-golden may replace it."""

    def drawn(look: Look) -> str:
        path = "r" if verbose else f"20250102T030405Z-{record().command}"
        return write(record(), CommandContext("config.yaml", f".ampdbg/{path}.json", verbose=verbose), look)

    return drawn


def linted(look: Look) -> str:
    found = engine.lint([str(LINTED)], Settings())
    findings = tuple(replace(one, path="train.py") for one in found.findings)
    return draw(lint.page(replace(found, findings=findings), "train.py", 0), look)


def compared(look: Look) -> str:
    now = record_of("ranges_overflow")
    calm = replace(now, findings=(), sites=tuple(replace(site, overflow="", headroom_bits=4.0) for site in now.sites))
    return draw(comparison.page(Comparison(calm, now, 1.0), "then.json", "now.json"), look, is_brief=True)


RECORDS: dict[str, Callable[[], Record]] = {name: partial(record_of, name) for name in RUNS}
RECORDS |= {"cost_cpu": lambda: ON_CPU, "cost_gpu": on_gpu}
PAGES = {name: page(record, verbose=True) for name, record in RECORDS.items()}
STORIES = {f"stories/{name}": page(RECORDS[name], verbose=False) for name in (*RUNS, "cost_gpu")}
"""The output of a command without ``--verbose``."""

SCREENS: dict[str, Screen] = {
    **PAGES,
    **STORIES,
    "codes": partial(as_text, None),
    "compare": compared,
    "doctor": lambda look: draw(doctor.page(Machine(CPU_TORCH)), look),
    "explain": partial(as_text, "forward-overflow"),
    "lint": linted,
}
SCREENS = {name: functools.cache(screen) for name, screen in SCREENS.items()}  # several tests read each
COLOURED = ["scan_forward_overflow", "ranges_example", "bisect_example", "suggestion", "cost"]
COLOURED = [*(f"stories/{name}" for name in COLOURED), "compare", "doctor", "explain", "lint"]
"""One page of each kind."""

WIDE = [
    "scan_runaway_scale",
    "ranges_example",
    "bisect_example",
    *(name for name in COLOURED if name != "explain"),
    "stories/run",
    "stories/replay",
    "stories/cost_gpu",
]


@pytest.mark.parametrize("name", SCREENS)
def test_every_screen_equals_its_golden_file(name: str, golden: Golden, request: pytest.FixtureRequest) -> None:
    if name in RUNS and request.config.getoption("--update-records"):
        keep(name)
    text = SCREENS[name](LOOK)
    golden(GOLDEN / f"{name}.txt", text)
    assert name not in STORIES or text.count("\n") <= 24


@pytest.mark.parametrize("name", WIDE)
def test_wide_screens_equal_their_golden_files(name: str, golden: Golden) -> None:
    golden(GOLDEN / f"{name}_140.txt", SCREENS[name](replace(LOOK, width=140)))


@pytest.mark.parametrize("name", COLOURED)
def test_colored_screens_equal_their_golden_files(name: str, golden: Golden) -> None:
    golden(GOLDEN / f"{name}.ansi", SCREENS[name](replace(LOOK, color=True)))


@pytest.mark.parametrize("name", SCREENS)
def test_every_screen_fits_its_width_except_for_lines_to_copy(name: str) -> None:
    for width in (40, 60, 80, 140) if name in STORIES else (60, 80, 140):
        lines = SCREENS[name](replace(LOOK, width=width)).splitlines()
        assert [line for line in lines if len(line) > width and not TO_COPY.match(line)] == []


@pytest.mark.parametrize("name", SCREENS)
def test_screens_can_be_ascii_and_color_changes_no_character(name: str) -> None:
    assert SCREENS[name](replace(LOOK, unicode=False)).isascii()
    colored = SCREENS[name](replace(LOOK, color=True))
    assert "\x1b[" in colored
    assert [line.rstrip() for line in ANSI.sub("", colored).splitlines()] == SCREENS[name](LOOK).splitlines()


@pytest.mark.parametrize("name", ["scan_forward_overflow", "bisect_example", "scan_true_nan"])
def test_the_verdict_and_remedy_of_a_story_are_on_the_whole_page(name: str) -> None:
    whole, story = (SCREENS[path](replace(LOOK, width=200)) for path in (name, f"stories/{name}"))
    said = [" ".join(line.split()) for line in story.splitlines() if "✗" in line or "Remedy" in line]
    assert said
    assert all(line[:20] in " ".join(whole.split()) for line in said)


@pytest.mark.parametrize("verdict", ["healthy", "precision", "other", "inconclusive"])
@pytest.mark.parametrize("name", RUNS)
def test_a_record_without_its_findings_still_has_a_page(name: str, verdict: Verdict) -> None:
    lost = replace(record_of(name), findings=(), verdict=verdict)
    text = page(lambda: lost, verbose=True)(LOOK)
    assert text.strip()
    assert "{" not in text.partition("\n")[0]


UNCLEAR = re.compile(
    r"\b(was|were|is|are) (seen|told|met|got|gone)\b|\bgo(es)? wrong\b|\bwent wrong\b|\bnow and then\b"
    r"|\bmust run in FP32\b|\bis to be\b|\bhas not got\b|\bnothing was found\b",
    re.IGNORECASE,
)
"""Passives without an actor, and words with a plainer form in the reports."""


def nan_only(record: Record) -> Record:
    """The record with every inf turned into NaN, without replays that show overflows, diagnosed again."""
    steps = tuple(map(_step, record.steps))
    return diagnose(replace(record, steps=steps, findings=(), investigations=(), verdict="inconclusive"))


def _step(step: Step) -> Step:
    nonfinite = tuple(replace(counts, inf=0, nan=counts.inf + counts.nan) for counts in step.nonfinite)
    return replace(step, groups=tuple(map(_group, step.groups)), nonfinite=nonfinite)


def _group(group: GroupOverflow) -> GroupOverflow:
    counts = (replace(counts, inf=0, nan=counts.inf + counts.nan) for counts in group.parameters)
    return replace(group, parameters=tuple(counts))


SCANS = [name for name in RUNS if name.startswith("scan_") and name != "scan_mask_constant"]


@pytest.mark.parametrize("name", SCANS)
def test_a_run_with_nan_only_is_diagnosed_without_the_word_overflow(name: str) -> None:
    record = nan_only(record_of(name))
    assert record.findings or not any(step.skipped for step in record.steps)
    assert "overflow" not in rendered(record).lower()


@pytest.mark.parametrize("name", RUNS)
def test_no_page_contains_an_unclear_phrase(name: str) -> None:
    text = " ".join(SCREENS[name](LOOK).split())
    assert UNCLEAR.findall(text) == []


def test_the_unclear_phrases_are_recognized() -> None:
    said = "no op was seen to go wrong in it, and 2 modules must run in FP32"
    assert len(list(UNCLEAR.finditer(said))) == 3


COMMANDS = ("scan", "run", "replay", "ranges", "bisect", "suggest-fp32", "cost")


searched = st.builds(
    lambda record, command, made, chosen, search: replace(
        record, command=command, trials=tuple(made), pins=tuple(chosen), search=search
    ),
    records(),
    st.sampled_from(COMMANDS),
    st.lists(trials, max_size=15),
    st.lists(pins, max_size=8),
    st.none() | st.builds(replace, searches, outcome=st.sampled_from(typing.get_args(Outcome))),
)


@given(searched)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_record_has_a_page(record: Record) -> None:
    assert rendered(record).strip()
    rendered(record, unicode=False, width=40, order="execution", top=1)
