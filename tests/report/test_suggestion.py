"""What is said beside a patch: the set, the proof, other remedies, the next command, in every look."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from ampdbg.record.pins import Proof, ProofStep
from ampdbg.record.run import Record
from ampdbg.report.formats import page_of
from ampdbg.report.formats.text import draw
from ampdbg.report.suggestion import PatchEdit, PatchFacts, headline
from ampdbg.report.view import Look, NextCommand, Typed
from tests.report.bisections import found, fp32_fails

PASSED = Proof(
    True,
    (
        ProofStep("the failing step (3)", True, "healthy; loss 2.3101, 2.3102 in FP32"),
        ProofStep("without lines 41 to 43 of model.py", True, "step 3 fails: loss NaN"),
        ProofStep("training 200 steps", True, "healthy; loss scale 65,536, 0 skipped steps"),
    ),
)
FAILED = Proof(False, (PASSED.steps[0], ProofStep("further batches", False, "1 of 3 healthy; loss NaN")))

PATCHED = PatchFacts(
    edits=(
        PatchEdit("lines 41 to 43 of model.py", ("applies to all 24 instances of GLU, 1 of them in the set",)),
        PatchEdit("Block.forward in model.py"),
    ),
    notes=("/home/me/model.py:41: scale before the product", "a larger loss scale"),
    next_command=NextCommand("apply the patch", "git apply .ampdbg/a-file-of-a-long-name-" + "x" * 60),
)


def proven() -> Record:
    return replace(found(), verification=PASSED)


def rendered(record: Record, suggested: PatchFacts, **look: object) -> str:
    typed = Typed(record_path="r.json", folder="/home/me")
    looks = replace(Look(width=80, color=False, unicode=True), **look)  # type: ignore[arg-type]
    return draw(page_of(record, typed, suggested), looks)


def test_why_no_code_is_edited_stands_where_the_patch_would() -> None:
    reasons = ("/home/me/model.py:12, 13: torch is another thing here", "blocks.2: no code of yours makes or calls it")
    told = (
        "\nWhy ampdbg edits no code\n  model.py:12, 13: torch is another thing here\n"
        "  blocks.2: no code of yours makes or calls it\n"
    )
    assert told in rendered(found(), PatchFacts(refused=reasons))
    assert "Why" not in rendered(replace(found(), verification=FAILED), PatchFacts(refused=reasons))


def test_a_command_to_copy_is_never_cut() -> None:
    assert PATCHED.next_command is not None
    for width in (40, 80):
        assert f"  {PATCHED.next_command.command}\n" in rendered(proven(), PATCHED, width=width)


@pytest.mark.parametrize("width", [40, 80, 120])
def test_it_fits(width: int) -> None:
    short = replace(PATCHED, next_command=None)
    lines = rendered(proven(), short, width=width, color=False).splitlines()
    assert max(len(line) for line in lines if not line.startswith("Record: ")) <= width


def test_ascii_alone_where_the_terminal_has_no_more() -> None:
    text = rendered(proven(), PATCHED, unicode=False)
    assert text.isascii()
    assert text.startswith("+ 2 places need FP32")


def test_colour_changes_no_word() -> None:
    plain = re.sub(r"\x1b\[[\d;]*m", "", rendered(proven(), PATCHED, color=True))
    assert plain.split() == rendered(proven(), PATCHED).split()


HEADLINES = {
    "proven": (proven(), PATCHED, "2 places need FP32; the patch for them is proven on the failing step."),
    "not proven": (found(), PATCHED, "2 places need FP32; the patch for them is not proven."),
    "by name": (proven(), PatchFacts(is_by_name=True), "2 places need FP32; this pins them by name."),
    "no code": (found(), PatchFacts(), "2 places need FP32, but ampdbg could not edit your code for them."),
    "failed": (
        replace(found(), verification=FAILED),
        PatchFacts(),
        (
            "2 places need FP32, but the patch for them failed its proof: "
            "further batches: 1 of 3 healthy; loss NaN. ampdbg does not suggest it."
        ),
    ),
    "one pin": (
        replace(proven(), pins=found().pins[:1]),
        PATCHED,
        "1 place needs FP32; the patch for it is proven on the failing step.",
    ),
}


@pytest.mark.parametrize("name", HEADLINES)
def test_each_end_has_its_headline(name: str) -> None:
    record, suggested, sentence = HEADLINES[name]
    assert headline(record, suggested).sentence == sentence


def test_without_pins_it_is_the_report_of_the_search_and_the_other_remedies() -> None:
    told = fp32_fails().findings[0].remedy
    text = rendered(fp32_fails(), PatchFacts(notes=(told, "normalise the data")))
    assert text.startswith("✗ No pin helps: step 3 fails in FP32 too.")
    assert "\nOther remedies\n  normalise the data\n" in text
    assert text.count(told) == 1
