"""What is said beside a patch: the set, the proof, other remedies, the next command, in every look."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from ampdbg.record.pins import FileDiff, Form, Handover, Outcome, PatchUnit, Proof, ProofStep, RootModel
from ampdbg.record.run import Investigation, Record, ScriptRun
from ampdbg.report.formats import written
from ampdbg.report.suggestion import content, headline
from ampdbg.report.view import Look, Typed
from tests.report.bisections import NAMES, found, fp32_fails

PASSED = Proof(
    True,
    (
        ProofStep("the failing step (3)", True, "healthy; loss 2.3101, 2.3102 in FP32"),
        ProofStep("without lines 41 to 43 of model.py", True, "step 3 fails: loss NaN"),
        ProofStep("training 200 steps", True, "healthy; loss scale 65,536, 0 skipped steps"),
    ),
)
FAILED = Proof(False, (PASSED.steps[0], ProofStep("further batches", False, "1 of 3 healthy; loss NaN")))

FILE = FileDiff("model.py", "utf-8", "+x\n")
PATCHED = Handover(
    "diff",
    names=NAMES,
    folder="/home/me",
    is_git=True,
    files=(FILE,),
    units=(
        PatchUnit("lines 41 to 43 of model.py", NAMES, ("applies to all 24 instances of GLU, 1 of them in the set",)),
        PatchUnit("Block.forward in model.py", ()),
    ),
    notes=("/home/me/model.py:41: scale before the product", "a larger loss scale"),
)


def proven() -> Record:
    return replace(found(), verification=PASSED)


WARNS = ProofStep("the gradients of step 3", True, "head.weight has none at any loss scale", warns=True)

FORMS: tuple[Form, ...] = ("module", "yaml", "json")
TYPED = Typed(record_path="r.json", folder="/home/me", verbose=True)
PATCH = "/home/me/.ampdbg/a-file-of-a-long-name-" + "x" * 60


def rendered(record: Record, suggested: Handover, typed: Typed = TYPED, **look: object) -> str:
    looks = replace(Look(width=80, color=False, unicode=True), **look)  # type: ignore[arg-type]
    return written(replace(record, command="suggest-fp32", handover=suggested), typed, looks, "text")


@pytest.mark.parametrize("verbose", [False, True])
def test_what_a_proof_warns_of_stands_in_the_story_and_in_the_table(verbose: bool) -> None:
    record = replace(found(), verification=replace(PASSED, steps=(*PASSED.steps, WARNS)))
    said = rendered(record, PATCHED, replace(TYPED, verbose=verbose))
    (line,) = (line for line in said.splitlines() if "the gradients of step 3" in line and "checks" not in line)
    assert line.split()[0] == "!"
    assert "has none at any loss scale" in line


def test_what_leaves_half_is_told_of_the_pins_and_not_of_a_patch_that_is_printed() -> None:
    by_name = replace(PATCHED, form="yaml", files=(), units=())
    said = [" ".join(rendered(proven(), suggested).split()) for suggested in (PATCHED, by_name)]
    assert "Pinned by name, the set takes" in said[0]
    assert "What the patch takes was not measured" in said[0]
    assert "The set takes" in said[1]
    assert "not measured" not in said[1]


ROOTS = (
    RootModel("blocks", "blocks", "the model of class Blocks that the script makes"),
    RootModel("net", "net", "the model that the script calls net", is_global=True),
)
SAID = (
    "The script has several models, and the name of a module begins with its model: blocks is the model of class "
    "Blocks that the script makes; net is the model that the script calls net."
)


def of_several_models() -> Record:
    search = proven().search
    assert search is not None
    return replace(proven(), search=replace(search, roots=ROOTS))


@pytest.mark.parametrize(
    ("script", "emulated", "again"),
    [
        (None, False, "ampdbg scan c.yaml"),
        (ScriptRun("tr.py", ("--name", "a b")), True, "ampdbg run --emulate tr.py --name 'a b'"),
        (ScriptRun("pack.train", ("mlp",), is_module=True), False, "ampdbg run -m pack.train mlp"),
    ],
)
def test_what_was_patched_is_run_again_as_it_was_started(script: ScriptRun | None, emulated: bool, again: str) -> None:
    record = proven()
    record = replace(record, script=script, environment=replace(record.environment, emulated=emulated))
    text = rendered(record, PATCHED, replace(TYPED, config="c.yaml", is_applied=True))
    assert text.endswith(f"Next: run it again, with the patch\n  {again}\n")


def test_the_lines_of_a_config_are_of_no_use_to_a_script() -> None:
    typed = replace(TYPED, config="step-1.safetensors", handed_over=PATCH)
    of_config, of_script = proven(), replace(proven(), script=ScriptRun("tr.py", ("mlp",)))
    told = [rendered(record, Handover("yaml", NAMES, "x = 1"), typed) for record in (of_config, of_script)]
    assert told[0].endswith("\n  ampdbg scan step-1.safetensors\n")
    assert told[1].endswith("\n  ampdbg suggest-fp32 step-1.safetensors --format module\n")
    assert "a script has no config" in told[1]


def test_of_several_models_it_says_which_object_each_name_is_of() -> None:
    typed = replace(TYPED, handed_over=PATCH)
    pages = {form: rendered(of_several_models(), Handover(form, NAMES, "x = 1"), typed) for form in FORMS}
    for text in pages.values():
        assert SAID in " ".join(text.split())
    told = " ".join(pages["module"].split("Next: ")[1].split())
    assert told == (
        "put it beside your code as ampdbg_pins.py, and call it with the model of class Blocks that the script makes "
        "and the model that the script calls net from ampdbg_pins import pin_fp32; pin_fp32(blocks=..., net=net)"
    )
    told = pages["yaml"].split("Next: ")[1]
    assert " ".join(told.split()) == "put these lines into a config whose model has these models for its parts"


def test_what_is_handed_over_of_several_models_says_so_too() -> None:
    texts = {}
    for form in FORMS:
        texts[form] = (content(replace(of_several_models(), handover=Handover(form, NAMES, "x = 1"))) or b"").decode()
    assert f"# {SAID}\nprecision:\n" in texts["yaml"]
    assert [root["name"] for root in json.loads(texts["json"])["roots"]] == ["blocks", "net"]
    one = content(replace(proven(), handover=Handover("json", NAMES, "x = 1"))) or b""
    assert "roots" not in json.loads(one)


def test_what_an_interrupt_of_the_proof_leaves_is_shown_and_marked() -> None:
    interrupted = replace(found(), interrupted=True)
    text = rendered(interrupted, PATCHED)
    assert " ".join(text.split()).startswith(
        "! Interrupted in the proof. 2 places need FP32; the patch for them is not"
    )
    assert "\nThe patch, not proven\n  +x\n" in text
    assert "\nThe set\n" in text
    assert content(replace(interrupted, handover=PATCHED)) is None
    before = rendered(interrupted, replace(PATCHED, files=(), units=()))
    assert before.startswith(f"! Interrupted after {len(found().trials)} trials. ")
    assert "The patch" not in before


def test_why_no_code_is_edited_stands_where_the_patch_would() -> None:
    reasons = ("/home/me/model.py:12, 13: torch is another thing here", "blocks.2: no code of yours makes or calls it")
    told = (
        "\nWhy ampdbg edits no code\n  model.py:12, 13: torch is another thing here\n"
        "  blocks.2: no code of yours makes or calls it\n"
    )
    assert told in rendered(found(), Handover("diff", refused=reasons))
    assert "Why" not in rendered(replace(found(), verification=FAILED), Handover("diff", refused=reasons))


def test_a_command_to_copy_is_never_cut() -> None:
    for width in (40, 80):
        page = rendered(proven(), PATCHED, replace(TYPED, handed_over=PATCH), width=width)
        assert f" apply {PATCH.removeprefix('/home/me/')}\n" in page


@pytest.mark.parametrize("width", [40, 80, 120])
def test_it_fits(width: int) -> None:
    lines = rendered(proven(), PATCHED, width=width, color=False).splitlines()
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
    "proven without the loss": (
        replace(proven(), investigations=(Investigation(3, "loss", (), has_loss=False),)),
        PATCHED,
        "2 places need FP32; the patch for them is proven on the modules of the failing step, without its loss.",
    ),
    "not proven": (found(), PATCHED, "2 places need FP32; the patch for them is not proven."),
    "by name": (proven(), Handover("module", NAMES, "x = 1"), "2 places need FP32; this pins them by name."),
    "no code": (found(), Handover("diff"), "2 places need FP32, but ampdbg could not edit your code for them."),
    "a constant": (
        proven(),
        replace(PATCHED, units=(PatchUnit("the constant on line 3 of model.py", ()),)),
        (
            "No module needs FP32: the patch keeps a constant within the range of half precision, and is proven on "
            "the failing step."
        ),
    ),
    "failed": (
        replace(found(), verification=FAILED),
        Handover("diff"),
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
    assert headline(replace(record, handover=suggested), suggested).sentence == sentence


def test_without_pins_it_is_the_report_of_the_search_and_the_other_remedies() -> None:
    told = fp32_fails().findings[0].remedy
    text = rendered(fp32_fails(), Handover("diff", notes=(told, "normalise the data")))
    assert text.startswith("✗ No pin helps: step 3 fails in FP32 too.")
    assert "\nOther remedies\n  normalise the data\n" in text
    assert text.count(told) == 1


@pytest.mark.parametrize(
    ("outcome", "is_left"),
    [("found", False), ("not-in-a-module", True), ("no-set-helps", True), ("out-of-trials", False)],
)
def test_where_all_has_been_tried_it_says_what_is_left_and_not_to_search_again(outcome: Outcome, is_left: bool) -> None:
    record = found()
    assert record.search is not None
    record = replace(record, verification=FAILED, search=replace(record.search, outcome=outcome))
    text = " ".join(rendered(record, Handover("diff"), replace(TYPED, config="c.yaml")).split())
    assert ("switch autocast off around the model and the loss together" in text) == is_left
    assert text.endswith("ampdbg explain forward-overflow" if is_left else "ampdbg bisect c.yaml --strategy ddmin")
    root = replace(record.findings[0], op="aten._to_copy.default")
    text = " ".join(
        rendered(replace(record, findings=(root,)), Handover("diff"), replace(TYPED, config="c.yaml")).split()
    )
    assert ("casts to half itself, take that cast away" in text) == is_left
