"""A suggestion: the page around its patch, and its forms as git, patch and Python read them."""

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ampdbg.patch.file_edits import FileEdit, base_folder
from ampdbg.proof.suggestion import Suggestion
from ampdbg.record.pins import FileDiff, Form, Handover, Outcome, PatchUnit, ProofStep, RootModel
from ampdbg.record.run import Investigation, Record, ScriptRun
from ampdbg.report.formats import written
from ampdbg.report.suggestion import applying, content, headline
from ampdbg.report.view import CommandContext, Look
from tests.commands.suggestions import AFTER, BEFORE, FAILED, PROOF, handed_over, proven, suggestion
from tests.report.bisections import BISECTIONS, NAMES, found
from tests.report.records import LOST

FILE = FileDiff("model.py", "utf-8", "+x\n")
UNITS = (PatchUnit("lines 41 to 43 of model.py", NAMES), PatchUnit("Block.forward in model.py", ()))
PATCHED = Handover("diff", NAMES, folder="/home/me", is_git=True, files=(FILE,), units=UNITS)

WARNS = ProofStep("the gradients of step 3", True, "head.weight has no gradient at any loss scale", warns=True)

FORMS: tuple[Form, ...] = ("module", "yaml", "json")
TYPED = CommandContext(record_path="r.json", folder="/home/me", verbose=True)
PATCH = "/home/me/.ampdbg/a-file-of-a-long-name-" + "x" * 60


def rendered(record: Record, suggested: Handover, typed: CommandContext = TYPED, **look: object) -> str:
    looks = replace(Look(width=80, color=False, unicode=True), **look)  # type: ignore[arg-type]
    return written(replace(record, command="suggest-fp32", handover=suggested), typed, looks, "text")


@pytest.mark.parametrize("verbose", [False, True])
def test_a_warning_of_the_proof_is_in_the_story_and_in_the_table(verbose: bool) -> None:
    record = replace(found(), verification=replace(PROOF, steps=(*PROOF.steps, WARNS)))
    said = rendered(record, PATCHED, replace(TYPED, verbose=verbose))
    (line,) = (line for line in said.splitlines() if "the gradients of step 3" in line and "checks" not in line)
    assert line.split()[0] == "!"
    assert "has no gradient at any loss scale" in line


def test_the_measured_cost_is_that_of_pins_by_name_and_not_of_the_patch() -> None:
    by_name = replace(PATCHED, form="yaml", files=(), units=())
    said = [" ".join(rendered(proven(), suggested).split()) for suggested in (PATCHED, by_name)]
    assert "Pinned by name, the set moves" in said[0]
    assert "ampdbg did not measure the cost of the patch itself" in said[0]
    assert "The set moves" in said[1]
    assert "did not measure" not in said[1]


ROOTS = (
    RootModel("blocks", "blocks", "the model of class Blocks that the script makes"),
    RootModel("net", "net", "the model that the script calls net", is_global=True),
)
SAID = (
    "The script has several models; a module's name starts with that of its model: blocks is the model of class "
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
def test_a_patched_rerun_repeats_the_original_command(script: ScriptRun | None, emulated: bool, again: str) -> None:
    record = proven()
    record = replace(record, script=script, environment=replace(record.environment, emulated=emulated))
    text = rendered(record, PATCHED, replace(TYPED, config="c.yaml", is_applied=True))
    assert text.endswith(f"Next: rerun with the patch\n  {again}\n")


def test_yaml_pins_of_a_script_suggest_the_module_form_instead() -> None:
    typed = replace(TYPED, config="step-1.safetensors", handed_over=PATCH)
    of_config, of_script = proven(), replace(proven(), script=ScriptRun("tr.py", ("mlp",)))
    told = [rendered(record, Handover("yaml", NAMES, "x = 1"), typed) for record in (of_config, of_script)]
    assert told[0].endswith("\n  ampdbg scan step-1.safetensors\n")
    assert told[1].endswith("\n  ampdbg suggest-fp32 step-1.safetensors --format module\n")
    assert "a script has no config" in told[1]


def test_pages_and_forms_explain_which_model_each_root_name_is() -> None:
    record, typed = of_several_models(), replace(TYPED, handed_over=PATCH)
    pages = {form: rendered(record, Handover(form, NAMES, "x = 1"), typed) for form in FORMS}
    texts = {form: content(replace(record, handover=Handover(form, NAMES, "x = 1"))) or b"" for form in FORMS}
    assert all(SAID in " ".join(text.split()) for text in pages.values())
    said = " ".join(pages["module"].split("Next: ")[1].split())
    assert said == (
        "save it beside your code as ampdbg_pins.py, and call it with the model of class Blocks that the script makes "
        "and the model that the script calls net from ampdbg_pins import pin_fp32; pin_fp32(blocks=..., net=net)"
    )
    said = " ".join(pages["yaml"].split("Next: ")[1].split())
    assert said == "put these lines into a config whose model contains these models"
    assert f"# {SAID}\nprecision:\n" in texts["yaml"].decode()
    assert [root["name"] for root in json.loads(texts["json"])["roots"]] == ["blocks", "net"]
    one = content(replace(proven(), handover=Handover("json", NAMES, "x = 1"))) or b""
    assert "roots" not in json.loads(one)


def test_an_interrupted_proof_shows_its_patch_as_not_proven() -> None:
    interrupted = replace(found(), interrupted=True)
    text = rendered(interrupted, PATCHED)
    assert " ".join(text.split()).startswith(
        "! Interrupted during the proof. 2 places need FP32; the patch for them is not"
    )
    assert "\nThe patch, not proven\n  +x\n" in text
    assert "\nThe set\n" in text
    assert content(replace(interrupted, handover=PATCHED)) is None
    before = rendered(interrupted, replace(PATCHED, files=(), units=()))
    assert before.startswith(f"! Interrupted after {len(found().trials)} trials. ")
    assert "The patch" not in before


def test_the_reasons_without_an_edit_replace_the_patch() -> None:
    reasons = (
        "/home/me/model.py:12, 13: torch is another thing here",
        "blocks.2: none of your code creates or calls it",
    )
    told = (
        "\nWhy ampdbg edits no code\n  model.py:12, 13: torch is another thing here\n"
        "  blocks.2: none of your code creates or calls it\n"
    )
    assert told in rendered(found(), Handover("diff", refused=reasons))
    assert "Why" not in rendered(replace(found(), verification=FAILED), Handover("diff", refused=reasons))
    assert "Why" not in rendered(found(), Handover("yaml", NAMES, "x = 1", refused=reasons))


def test_a_command_to_copy_is_never_cut() -> None:
    for width in (40, 80):
        page = rendered(proven(), PATCHED, replace(TYPED, handed_over=PATCH), width=width)
        assert f" apply {PATCH.removeprefix('/home/me/')}\n" in page


NO_LOSS = (Investigation(3, "loss", LOST, reach="modules"),)
CONSTANT = (PatchUnit("the constant on line 3 of model.py", ()),)
FAILS = "further batches: 1 of 3 healthy; loss NaN. ampdbg does not suggest it."
RANGE = "the range of half precision"
HEADLINES = {
    "proven": (proven(), PATCHED, "2 places need FP32; the patch for them is proven on the failing step."),
    "proven without the loss": (
        replace(proven(), investigations=NO_LOSS),
        PATCHED,
        "2 places need FP32; the patch for them is proven on the modules of the failing step, without its loss.",
    ),
    "not proven": (found(), PATCHED, "2 places need FP32; the patch for them is not proven."),
    "by name": (proven(), Handover("module", NAMES, "x = 1"), "2 places need FP32; this pins them by name."),
    "no code": (found(), Handover("diff"), "2 places need FP32, but ampdbg could not edit your code for them."),
    "a constant": (
        proven(),
        replace(PATCHED, units=CONSTANT),
        f"No module needs FP32: the patch keeps a constant within {RANGE}, and is proven on the failing step.",
    ),
    "failed": (
        replace(found(), verification=FAILED),
        Handover("diff"),
        f"2 places need FP32, but the patch for them failed its proof: {FAILS}",
    ),
    "one pin": (
        replace(proven(), pins=found().pins[:1]),
        PATCHED,
        "1 place needs FP32; the patch for it is proven on the failing step.",
    ),
}


@pytest.mark.parametrize("name", HEADLINES)
def test_the_headline_states_the_outcome_of_the_suggestion(name: str) -> None:
    record, suggested, sentence = HEADLINES[name]
    assert headline(replace(record, handover=suggested), suggested).sentence == sentence


def test_without_pins_the_page_reports_the_search_and_other_remedies() -> None:
    record = BISECTIONS["fp32_fails"]()
    told = record.findings[0].remedy
    text = rendered(record, Handover("diff", notes=(told, "normalise the data")), width=400)
    assert text.startswith("✗ No pin helps: step 0 fails in FP32 too.")
    assert "\nOther remedies\n  normalise the data\n" in text
    assert text.count(told) == 1


TRIED = (PatchUnit("line 3 of model.py", (), ("the failing step (0): loss inf",)),)
BY_HAND = "Cast what these lines read with .float(), and remove their own casts to half."


@pytest.mark.parametrize("verbose", [False, True])
def test_a_failed_patch_is_listed_with_advice_for_an_edit_by_hand(*, verbose: bool) -> None:
    failed, typed = replace(found(), verification=FAILED), replace(TYPED, verbose=verbose)
    text = rendered(failed, Handover("diff", units=TRIED), typed, width=400)
    assert "\nPatches that failed their proofs\n  line 3 of model.py\n" in text
    assert ("loss inf" in text) == verbose
    assert text.count(BY_HAND) == 1
    healed = rendered(proven(), PATCHED, typed, width=400)
    assert not any(said in healed for said in ("Patches that failed", BY_HAND))


@pytest.mark.parametrize(
    ("outcome", "is_left"),
    [("found", False), ("not-in-a-module", True), ("no-set-helps", True), ("out-of-trials", False)],
)
def test_after_every_attempt_failed_no_further_search_is_advised(outcome: Outcome, is_left: bool) -> None:
    record = found()
    assert record.search is not None
    record = replace(record, verification=FAILED, search=replace(record.search, outcome=outcome))
    text = " ".join(rendered(record, Handover("diff"), replace(TYPED, config="c.yaml")).split())
    assert ("disable autocast around the model and the loss together" in text) == is_left
    assert text.endswith("ampdbg explain forward-overflow" if is_left else "ampdbg bisect c.yaml --strategy ddmin")
    record = replace(record, findings=(replace(record.findings[0], op="aten._to_copy.default"),))
    text = " ".join(rendered(record, Handover("diff"), replace(TYPED, config="c.yaml")).split())
    assert ("casts to half itself, remove that cast" in text) == is_left


# The forms


def text_of(found: Suggestion, form: Form = "diff") -> bytes:
    text = content(replace(found.record, handover=replace(handover_of(found), form=form)))
    assert text is not None
    return text


def handover_of(found: Suggestion) -> Handover:
    assert found.record.handover is not None
    return found.record.handover


needs_patch = pytest.mark.skipif(shutil.which("patch") is None, reason="there is no patch")


def run(folder: Path, *command: str, text: bytes = b"") -> str:
    done = subprocess.run(command, cwd=folder, input=text, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.decode()


def both(folder: Path) -> tuple[bytes, bytes]:
    return (folder / "model.py").read_bytes(), (folder / "parts" / "train.py").read_bytes()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path.resolve() / "repository"
    folder.mkdir()
    run(folder, "git", "init", "-q")
    return folder


HEAD = """\
# Keeps in FP32 under autocast: blocks.2.attn, blocks.3 (its own lines).
#   - line 2 of model.py
#   - line 2 of train.py
# Proven by ampdbg 0.1.0 (torch 2.6.0, cpu, CUDA's autocast emulated):
#   - the failing step (3): healthy; loss 2.3101, 2.3102 in FP32
#   - without line 2 of model.py: step 3 fails: loss NaN
diff --git a/model.py b/model.py
"""


def handing(found: Suggestion, **fields: Any) -> Suggestion:
    """The suggestion with a changed handover."""
    return replace(found, record=replace(found.record, handover=replace(handover_of(found), **fields)))


def test_the_diff_starts_with_comments_on_pins_places_and_proof(tmp_path: Path) -> None:
    found = suggestion(tmp_path)
    assert text_of(found).decode().startswith(HEAD)
    names = tuple(f"blocks.{n}.attn" for n in range(12))
    many = handing(found, names=names, units=(PatchUnit("line 2 of model.py", names),))
    first = text_of(many).decode().splitlines()[0]
    assert first == "# Keeps in FP32 under autocast: 12 modules, blocks.0.attn to blocks.11.attn."
    noted = replace(handover_of(found).units[0], notes=("line 2 cannot be edited: a lambda", "applies to all 24 GLU"))
    lines = "#   - line 2 of model.py\n#     line 2 cannot be edited: a lambda\n#     applies to all 24 GLU\n"
    assert lines in text_of(handing(found, units=(noted,))).decode()


GIT = ("git", "apply")


@pytest.mark.parametrize(
    ("project", "folder", "command", "is_git"),
    [
        ("repository/project", "repository", GIT, True),
        ("repository/project", "repository/project", GIT, True),
        (".", ".", GIT, False),
        pytest.param(".", ".", ("patch", "-p1"), False, marks=needs_patch),
    ],
    ids=["git", "git below the root", "git outside of a repository", "patch"],
)
def test_the_diff_applies_and_reverts_with_git_and_patch(
    project: str, folder: str, command: tuple[str, ...], is_git: bool, repository: Path
) -> None:
    root, base = repository.parent / project, repository if is_git else repository.parent
    found = suggestion(root)
    assert base_folder(found.edits, root / "parts" if is_git else root) == (base, is_git)
    text = text_of(found)
    run(repository.parent / folder, *command, text=text)
    assert both(root) == (AFTER, AFTER)
    run(repository.parent / folder, *command, "-R", text=text)
    assert both(root) == (BEFORE, BEFORE)


HARD = {
    "CRLF": (b"a = 1\r\nb = 2\r\n", b"a = 1\r\nb = 3\r\n"),
    "latin-1": (b"# -*- coding: latin-1 -*-\nname = 'M\xfcller'\n", b"# -*- coding: latin-1 -*-\nname = 'M\xfcnch'\n"),
    "no newline at the end": (b"a = 1", b"a = 2"),
    "a line like a header": (b"x = 1\n-- a/model.py\n", b"x = 2\n-- a/model.py\n"),
}


@pytest.mark.parametrize("name", HARD)
def test_the_diff_and_its_json_form_keep_every_byte(name: str, tmp_path: Path) -> None:
    before, after = HARD[name]
    file = tmp_path.resolve() / "model.py"
    found = handed_over(proven(), tmp_path, FileEdit(file, before, after))
    (entry,) = json.loads(text_of(found, "json"))["files"]
    for text in (text_of(found), entry["diff"].encode(entry["encoding"])):
        file.write_bytes(before)
        run(tmp_path, *GIT, text=text)
        assert file.read_bytes() == after


def test_a_proof_that_looks_like_a_diff_does_not_break_the_patch(tmp_path: Path) -> None:
    detail = "line\n--- a/model.py\n+++ b/model.py\n@@ -1 +1 @@\n-def\ndiff --git a/x b/x"
    proof = replace(PROOF, steps=(replace(PROOF.steps[0], detail=detail),))
    run(tmp_path, *GIT, text=text_of(suggestion(tmp_path, record=replace(proven(), verification=proof))))
    assert both(tmp_path) == (AFTER, AFTER)


def test_files_outside_the_config_folder_are_named_from_the_common_folder(tmp_path: Path) -> None:
    found = suggestion(tmp_path / "source")
    (tmp_path / "configs").mkdir()
    assert base_folder(found.edits, tmp_path / "configs") == (tmp_path.resolve(), False)
    beside = handed_over(proven(), tmp_path / "configs", *found.edits)
    assert b"--- a/source/model.py" in text_of(beside)


@pytest.mark.parametrize("edited", ["workload.py", "clone/model.py", "clone/parts/train.py"])
@pytest.mark.parametrize("is_repository", [True, False])
def test_paths_in_a_patch_start_at_the_same_folder_for_every_edited_file(
    edited: str, is_repository: bool, tmp_path: Path
) -> None:
    """A clone beside the config is a separate repository."""
    folder = tmp_path.resolve()
    file = folder / edited
    for repository in [folder] * is_repository + [folder / "clone"]:
        repository.mkdir(exist_ok=True)
        run(repository, "git", "init", "-q")
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(BEFORE)
    found = handed_over(proven(), folder, FileEdit(file, BEFORE, AFTER))
    assert base_folder(found.edits, folder) == (folder, is_repository)
    run(folder, *GIT, text=text_of(found))
    assert file.read_bytes() == AFTER


def test_the_module_form_is_the_helper_after_comments_on_pins_and_proof(tmp_path: Path) -> None:
    found = suggestion(tmp_path)
    text = text_of(found, "module").decode()
    head = "# Keeps in FP32 under autocast: blocks.2.attn, blocks.3 (its own lines).\n# Proven by ampdbg "
    assert text.startswith(head)
    assert "def pin_fp32(" in handover_of(found).helper
    assert text.endswith(handover_of(found).helper)
    compile(text, "ampdbg_pins.py", "exec")


def test_json_has_the_pins_the_diffs_and_the_proof(tmp_path: Path) -> None:
    found = suggestion(tmp_path)
    data = json.loads(text_of(found, "json"))
    assert (data["format"], data["version"], data["names"]) == ("ampdbg.patch", 1, ["blocks.2.attn", "blocks.3:own"])
    assert [pin["module"] for pin in data["pins"]] == ["blocks.2.attn", "blocks.3"]
    assert [file["path"] for file in data["files"]] == ["model.py", "parts/train.py"]
    assert data["units"][0] == {"title": "line 2 of model.py", "pins": ["blocks.2.attn"], "notes": []}
    assert data["proof"]["passed"] is True
    assert data["notes"] == list(handover_of(found).notes)


def test_a_patch_without_a_folder_is_applied_in_the_current_folder() -> None:
    assert applying(Handover("diff", is_git=True), "a.patch") == "git apply a.patch"
    assert applying(Handover("diff"), "a.patch") == "patch -p1 < a.patch"
