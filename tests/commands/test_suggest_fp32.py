"""``ampdbg suggest-fp32``: stdout, stderr and exit codes. The end-to-end tests are in tests/suggestion."""

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

import ampdbg
from ampdbg.commands import suggest_fp32
from ampdbg.config.file import load_config
from ampdbg.config.schema import Config
from ampdbg.errors import AmpdbgError, PatchError, WorkloadError
from ampdbg.patch import file_edits
from ampdbg.proof import suggestion as suggestions
from ampdbg.proof.suggestion import Suggestion
from ampdbg.record.file import read_record, write_record
from ampdbg.record.run import Record
from tests.commands.program import Here
from tests.commands.suggestions import AFTER, BEFORE, FAILED, PROOF, handed_over, proven, suggestion
from tests.report.bisections import BISECTIONS, found, not_in_a_module

CONFIG = "model: {target: net.py:build_model}\ndata: {target: net.py:build_data}\ntrain: {steps: 3}\n"
NET = "def build_model(): ...\ndef build_data(): ...\n"


@dataclass
class Faked:
    """A search and a proof that run nothing: returns ``found`` and keeps the arguments of its calls."""

    found: Suggestion
    configs: list[Config] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, config: Config, **options: Any) -> Suggestion:
        self.configs.append(config)
        self.options = options
        if "observer" in options:
            options["observer"].search(("", "block"))
            options["observer"].stage("planning the patch")
        search = self.found.record.search
        searched = replace(search, strategy=options["strategy"]) if search is not None else None
        return with_handover(
            replace(self.found, record=replace(self.found.record, search=searched)), form=options["form"]
        )


Fake = Callable[..., Faked]


@pytest.fixture
def fake(here: Here) -> Fake:
    """Replaces the real suggestion: with a patch of model.py, or without a patch if only ``record`` is given."""
    Path("net.py").write_text(NET, encoding="utf-8")
    Path("config.yaml").write_text(CONFIG, encoding="utf-8")

    def put(record: Record | None = None, made: Suggestion | None = None, **fields: Any) -> Faked:
        made = made or (suggestion(here.folder) if record is None else without_patch(here.folder, record))
        faked = Faked(with_handover(made, **fields))
        here.monkeypatch.setattr(suggestions, "suggest", faked)
        return faked

    return put


def with_handover(made: Suggestion, **fields: Any) -> Suggestion:
    assert made.record.handover is not None
    return replace(made, record=replace(made.record, handover=replace(made.record.handover, **fields)))


def without_patch(folder: Path, record: Record) -> Suggestion:
    suggestion(folder)
    return handed_over(record, folder)


def saved(pattern: str) -> Path:
    (file,) = Path(".ampdbg").glob(pattern)
    return file


# The patch and the report


def test_stdout_is_the_patch_and_stderr_is_the_report_unless_quiet(here: Here, fake: Fake) -> None:
    fake()
    result = here("suggest-fp32", "config.yaml")
    assert result.code == 0
    assert result.stdout.startswith("# Keeps in FP32 under autocast: blocks.2.attn, blocks.3 (its own lines).\n")
    assert result.stdout.endswith("+    y = x.float() @ x.float()\n     return y\n")
    assert saved("*.patch").read_text(encoding="utf-8") == result.stdout
    lines = result.stderr
    assert "✓ 2 places need FP32; the patch for them is proven on the failing step." in lines
    assert "blocks.3:own" in lines
    assert "without line 2 of model.py" in lines
    assert "Other remedies\n  model.py:41: scale before the product\n" in lines
    assert "planning the patch" in lines
    assert lines.rstrip().endswith(".patch")
    assert "\n  patch -p1 < .ampdbg/" in lines
    quiet = here("suggest-fp32", "config.yaml", "--quiet")
    assert (quiet.stdout, quiet.stderr) == (result.stdout, "")


def test_the_report_is_printed_after_the_patch(here: Here, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    fake()
    order: list[str] = []
    monkeypatch.setattr(suggest_fp32, "write_result", lambda result, stream: order.append("patch"))
    monkeypatch.setattr(suggest_fp32, "say", lambda text: order.append(text[:1]))
    here("suggest-fp32", "config.yaml")
    assert order[-2:] == ["patch", "✓"]


def test_no_verify_marks_the_patch_as_not_proven(here: Here, fake: Fake) -> None:
    faked = fake(made=suggestion(here.folder, record=replace(proven(), verification=None)))
    result = here("suggest-fp32", "config.yaml", "--no-verify")
    assert faked.options["verify"] is False
    assert "# Not proven: with --no-verify, ampdbg ran nothing with this patch." in result.stdout
    assert "Proven by" not in result.stdout
    assert "the patch for them is not proven" in result.stderr
    assert result.code == 0


def test_json_prints_the_record_that_is_written(here: Here, fake: Fake) -> None:
    fake()
    result = here("suggest-fp32", "config.yaml", "--quiet", "--json", "--record", "r.json")
    assert json.loads(result.stdout) == json.loads(Path("r.json").read_text(encoding="utf-8"))
    assert read_record(Path("r.json")).verification == PROOF


def test_output_writes_the_patch_to_a_file(here: Here, fake: Fake) -> None:
    fake()
    printed = here("suggest-fp32", "config.yaml", "--quiet").stdout
    result = here("suggest-fp32", "config.yaml", "--output", "fix.patch")
    assert (result.code, result.stdout) == (0, "")
    assert Path("fix.patch").read_text(encoding="utf-8") == printed
    assert result.stderr.rstrip().endswith("< fix.patch")


@pytest.mark.parametrize("form", ["diff", "module", "yaml", "json"])
def test_output_overwrites_only_an_empty_file_or_an_earlier_output(form: str, here: Here, fake: Fake) -> None:
    faked = fake(made=suggestion(here.folder))
    write_record(proven(), Path("r.json"))
    Path("other.py").write_text("# Keeps\nimport torch\n", encoding="utf-8")
    given = ("suggest-fp32", "config.yaml", "--format", form, "--quiet")
    for name in ("config.yaml", "model.py", "other.py", "r.json"):
        before = Path(name).read_bytes()
        result = here(*given, "--output", name)
        assert (result.code, result.stdout, Path(name).read_bytes(), faked.configs) == (2, "", before, [])
        assert f"--output {name} " in result.stderr
        assert "would be overwritten; name another file" in result.stderr
    Path("empty").touch()
    for name in ("empty", "empty"):
        assert here(*given, "--output", name).code == 0
    assert Path("empty").stat().st_size


def test_output_does_not_overwrite_the_config_of_the_run(here: Here, fake: Fake) -> None:
    faked = fake()
    assert here("suggest-fp32", "config.yaml", "--format", "yaml", "--quiet", "--output", "new.yaml").code == 0
    Path("new.yaml").write_text(Path("new.yaml").read_text("utf-8") + Path("config.yaml").read_text("utf-8"), "utf-8")
    del faked.configs[:]
    result = here("suggest-fp32", "new.yaml", "--format", "yaml", "--output", "new.yaml")
    assert (result.code, faked.configs) == (2, [])
    assert "--output new.yaml is the file of the config, and would be overwritten" in result.stderr


def test_record_and_output_must_name_two_different_files(here: Here, fake: Fake) -> None:
    faked = fake()
    result = here("suggest-fp32", "config.yaml", "--record", "x", "--output", "./x")
    assert (result.code, faked.configs, Path("x").exists()) == (2, [], False)
    assert result.stderr == (
        "error: --output x is the file of the record, and would be overwritten; name another file\n"
    )


def test_an_unwritable_output_is_refused_before_the_search(here: Here, fake: Fake) -> None:
    faked = fake()
    result = here("suggest-fp32", "config.yaml", "--output", "nowhere/x.patch")
    assert (result.code, result.stdout, faked.configs) == (2, "", [])
    assert result.stderr.replace("\\", "/") == (
        "error: nowhere/x.patch: cannot be written: there is no folder nowhere\n"
    )
    here.monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    result = here("suggest-fp32", "config.yaml", "--output", "x.patch")
    assert (result.code, faked.configs) == (2, [])
    assert result.stderr == "error: x.patch: cannot be written: Permission denied\n"


def test_an_output_folder_lost_during_the_search_costs_neither_patch_nor_record(here: Here, fake: Fake) -> None:
    fake()
    Path("out").mkdir()
    here.monkeypatch.setattr(file_edits, "check_writable", lambda path: Path("out").rmdir())
    result = here.refused("suggest-fp32", "config.yaml", "--output", "out/x.patch")
    patch, record = saved("*.patch"), saved("*-suggest-fp32.json")
    last = result.stderr.splitlines()[-1].replace("\\", "/")
    assert last.startswith("error: out/x.patch: cannot be written: ")
    assert last.endswith(f"; the patch is in {patch.as_posix()} and the record is in {record.as_posix()}")
    assert patch.read_bytes().startswith(b"# Keeps in FP32")


def test_the_saved_patch_keeps_latin_1_bytes_and_crlf_line_endings(here: Here, fake: Fake) -> None:
    after = AFTER.replace(b"y = ", b"# M\xfcller\r\n    y = ")
    fake(made=suggestion(here.folder, after=after))
    assert here("suggest-fp32", "config.yaml", "--quiet").code == 0
    assert b"+    # M\xfcller\r\n" in saved("*.patch").read_bytes()


# The other formats


def test_format_module_prints_pin_fp32_with_its_proof(here: Here, fake: Fake) -> None:
    faked = fake()
    result = here("suggest-fp32", "config.yaml", "--format", "module")
    assert faked.options["form"] == "module"
    assert "#   - the failing step (3): healthy; loss 2.3101, 2.3102 in FP32\n" in result.stdout
    assert "def pin_fp32(model):" in result.stdout
    compile(result.stdout, "ampdbg_pins.py", "exec")
    assert result.stderr.rstrip().endswith("from ampdbg_pins import pin_fp32; pin_fp32(model)")


def test_format_yaml_prints_pins_that_the_config_accepts(here: Here, fake: Fake) -> None:
    fake()
    result = here("suggest-fp32", "config.yaml", "--format", "yaml")
    proof, pins = result.stdout.split("precision:\n")
    assert "#   - the failing step (3): healthy; loss 2.3101, 2.3102 in FP32\n" in proof
    assert pins == "  pins:\n    - blocks.2.attn\n    - blocks.3:own\n"
    Path("config.yaml").write_text(CONFIG + result.stdout, encoding="utf-8")
    assert load_config(Path("config.yaml")).precision.pins == ("blocks.2.attn", "blocks.3:own")


@pytest.mark.parametrize("form", ["module", "yaml"])
def test_code_that_cannot_be_edited_can_be_pinned_by_name(form: str, here: Here, fake: Fake) -> None:
    fake(record=replace(found(), verification=None))
    result = here("suggest-fp32", "config.yaml")
    assert (result.code, result.stdout) == (1, "")
    assert "✗ 2 places need FP32, but ampdbg could not edit your code for them." in result.stderr
    assert result.stderr.rstrip().endswith("ampdbg suggest-fp32 config.yaml --format module")
    by_name = here("suggest-fp32", "config.yaml", "--format", form)
    assert by_name.code == 0
    assert "blocks.2.attn" in by_name.stdout


def test_format_yaml_exits_with_1_for_a_line_of_the_step_function(here: Here, fake: Fake) -> None:
    fake(record=not_in_a_module())
    result = here("suggest-fp32", "config.yaml", "--format", "yaml")
    assert (result.code, result.stdout) == (1, "")


# Applying


def applied_by(command: str, given: str = "") -> bool:
    """Whether a shell command applies the patch to both files; restores the files."""
    files = [Path("model.py"), Path("parts/train.py")]
    files = files if files[0].exists() else [Path("..") / file for file in files]
    done = subprocess.run(command, shell=True, input=given.encode(), capture_output=True, check=False)
    after = [file.read_bytes() for file in files]
    for file in files:
        file.write_bytes(BEFORE)
    return done.returncode == 0 and after == [AFTER, AFTER]


@pytest.mark.skipif(os.name == "nt", reason="the commands are quoted for a POSIX shell")
@pytest.mark.parametrize("is_repository", [True, False])
def test_commands_printed_in_a_subfolder_patch_the_files_outside(is_repository: bool, here: Here, fake: Fake) -> None:
    if is_repository:
        subprocess.run(["git", "init", "-q"], check=True)
    fake()
    here.monkeypatch.chdir("parts")
    result = here("suggest-fp32", "../config.yaml")
    warning, *_ = [line for line in result.stderr.splitlines() if line.startswith("warning")]
    plain, way = ("git apply", "git -C .. apply") if is_repository else ("patch -p1", "patch -p1 -d ..")
    assert warning == f"warning: the paths of this diff start at {here.folder.resolve()}; type ... | {way}"
    assert not applied_by(plain, result.stdout)
    assert applied_by(way, result.stdout)
    command = result.stderr.splitlines()[-1].strip()
    assert command.startswith(way)
    assert applied_by(command)
    assert here("suggest-fp32", "../config.yaml", "--quiet").stderr == f"{warning}\n"
    assert "warning" not in here("suggest-fp32", "../config.yaml", "--format", "json").stderr
    assert "warning" not in here("suggest-fp32", "../config.yaml", "--output", "x.patch").stderr


def test_git_apply_needs_no_folder_option_at_the_root_of_the_repository(here: Here, fake: Fake) -> None:
    subprocess.run(["git", "init", "-q"], check=True)
    fake()
    result = here("suggest-fp32", "config.yaml")
    assert "warning" not in result.stderr
    assert result.stderr.splitlines()[-1].replace("\\", "/").startswith("  git apply .ampdbg/")


def test_apply_edits_the_files_and_saves_a_patch_that_git_can_revert(here: Here, fake: Fake) -> None:
    fake()
    result = here("suggest-fp32", "config.yaml", "--apply")
    assert (result.code, result.stdout) == (0, "")
    assert Path("model.py").read_bytes() == Path("parts/train.py").read_bytes() == AFTER
    assert result.stderr.rstrip().endswith("ampdbg scan config.yaml")
    subprocess.run(["git", "apply", "-R", str(saved("*.patch"))], check=True)
    assert Path("model.py").read_bytes() == BEFORE


def test_apply_refuses_uncommitted_work_unless_forced(here: Here, fake: Fake) -> None:
    subprocess.run(["git", "init", "-q"], check=True)
    fake()
    result = here("suggest-fp32", "config.yaml", "--apply")
    assert result.code == 2
    assert "Commit or stash them, or use --force" in result.stderr
    assert "rerun with the patch" not in result.stderr
    last = result.stderr.splitlines()[-1].replace("\\", "/")
    assert last.startswith("the findings so far: ampdbg report .ampdbg/")
    assert f"\nthe patch is in {saved('*.patch').as_posix()}\n" in result.stderr.replace("\\", "/")
    assert Path("model.py").read_bytes() == BEFORE
    forced = here("suggest-fp32", "config.yaml", "--apply", "--force")
    assert (forced.code, "rerun with the patch" in forced.stderr) == (0, True)
    assert Path("model.py").read_bytes() == AFTER


def test_apply_warns_of_uncommitted_changes_before_the_search(here: Here, fake: Fake) -> None:
    subprocess.run(["git", "init", "-q"], check=True)
    fake()
    lines = here("suggest-fp32", "config.yaml", "--apply").stderr.splitlines()
    assert lines[0].startswith(f"warning: {Path('net.py').resolve()} has uncommitted changes; ")
    assert lines[1] == "loading model and data"
    assert "warning" not in here("suggest-fp32", "config.yaml").stderr


def test_a_refused_patch_is_saved_next_to_the_record_and_overwrites_no_file(here: Here, fake: Fake) -> None:
    fake()
    Path("model.py").write_bytes(b"changed")
    assert here("suggest-fp32", "config.yaml", "--apply", "--record", "r.json").code == 2
    assert Path("r.patch").read_bytes().startswith(b"# Keeps in FP32")
    Path("r.patch").write_bytes(b"mine")
    result = here("suggest-fp32", "config.yaml", "--apply", "--record", "r.json")
    assert result.stderr.splitlines()[-1] == "the findings so far: ampdbg report r.json"
    assert Path("r.patch").read_bytes() == b"mine"


# No patch


WITHOUT = {
    "fp32_fails": "✗ No pin helps: ",
    "no_pin_helps": "✗ No pin helps: precision is not the cause of the failure at step 0.",
    "misused": "✗ ampdbg looks for no pin: repair this misuse first, since it can cause the other",
}


@pytest.mark.parametrize("name", WITHOUT)
@pytest.mark.parametrize("form", ["diff", "module", "yaml", "json"])
def test_a_failure_that_no_pin_cures_has_a_reason_but_no_patch(name: str, form: str, here: Here, fake: Fake) -> None:
    fake(record=BISECTIONS[name](), notes=("clamp inside the root",))
    result = here("suggest-fp32", "config.yaml", "--format", form, "--quiet")
    assert (result.code, result.stdout) == (1, "")
    assert " ".join(result.stderr.split()).startswith(WITHOUT[name])
    assert "Other remedies\n  clamp inside the root\n" in result.stderr


@pytest.mark.parametrize("form", ["diff", "module", "yaml", "json"])
def test_a_patch_that_failed_its_proof_is_not_printed(form: str, here: Here, fake: Fake) -> None:
    fake(record=replace(proven(), verification=FAILED))
    result = here("suggest-fp32", "config.yaml", "--format", form)
    assert (result.code, result.stdout) == (1, "")
    assert "failed its proof: further batches: 1 of 3 healthy; loss NaN. ampdbg does not" in result.stderr.replace(
        "\n", " "
    )
    assert result.stderr.rstrip().endswith("ampdbg bisect config.yaml --strategy ddmin")


def test_the_next_command_after_a_failed_patch_with_a_refused_edit_is_format_module(here: Here, fake: Fake) -> None:
    fake(record=replace(proven(), verification=FAILED), refused=("main.py: where it makes its model is not known",))
    result = here("suggest-fp32", "config.yaml")
    assert result.code == 1
    assert result.stderr.rstrip().endswith("ampdbg suggest-fp32 config.yaml --format module")


@pytest.mark.parametrize(
    ("name", "code", "said"), [("nothing_to_pin", 0, "? Nothing to pin yet"), ("interrupted", 130, "! Interrupted")]
)
def test_a_healthy_or_interrupted_run_prints_no_patch(name: str, code: int, said: str, here: Here, fake: Fake) -> None:
    fake(record=BISECTIONS[name]())
    result = here("suggest-fp32", "config.yaml")
    assert (result.code, result.stdout) == (code, "")
    assert said in result.stderr


# Where the config comes from


def test_suggest_fp32_without_an_argument_takes_the_latest_record(here: Here, fake: Fake) -> None:
    faked = fake()
    write_record(replace(found(), config=load_config(Path("config.yaml")).resolved()), Path(".ampdbg/latest.json"))
    assert here("suggest-fp32", "--set", "train.steps=9").code == 0
    assert (faked.configs[0].train.steps, faked.configs[0].model.target) == (9, "net.py:build_model")
    assert faked.options["known"].search == found().search


OPTIONS = "config.yaml --set train.clip_grad_norm=2.5 --steps 9 --seed 4"
NEXT = {
    "proven pins": (None, "--format yaml", f"scan {OPTIONS}"),
    "a proven patch as data": (None, "--format json", f"suggest-fp32 {OPTIONS} --strategy ddmin"),
    "an interrupt": (replace(BISECTIONS["interrupted"](), command="suggest-fp32"), "", f"suggest-fp32 {OPTIONS}"),
    "no code to edit": (replace(found(), verification=None), "", f"suggest-fp32 {OPTIONS} --format module"),
}


@pytest.mark.parametrize(("record", "form", "expected"), NEXT.values(), ids=NEXT)
def test_the_next_command_carries_the_options_that_change_the_run(
    record: Record | None, form: str, expected: str, here: Here, fake: Fake
) -> None:
    fake(record)
    strategy = "--strategy ddmin" if record is None else ""
    result = here("suggest-fp32", *f"{OPTIONS} {strategy} {form}".split())
    assert result.stderr.splitlines()[-1].strip() == f"ampdbg {expected}"


def test_the_next_step_for_a_record_does_not_name_a_config_file(here: Here, fake: Fake) -> None:
    fake()
    write_record(replace(found(), config=load_config(Path("config.yaml")).resolved()), Path("r.json"))
    result = here("suggest-fp32", "r.json", "--format", "yaml")
    assert result.stderr.rstrip().endswith("\nNext: put these lines into the config of that run")
    result = here("suggest-fp32", "r.json", "--apply")
    assert result.stderr.splitlines()[-1] == "  ampdbg scan r.json"


def test_a_module_file_is_refused_with_the_bisect_command_to_use(here: Here, fake: Fake) -> None:
    fake()
    result = here.refused("suggest-fp32", "--module", "net.py")
    assert result.stderr.endswith("; suggest-fp32 takes the record that this writes: ampdbg bisect --module net.py\n")


def test_the_options_reach_the_search(here: Here, fake: Fake) -> None:
    faked = fake()
    here("suggest-fp32", "config.yaml", "--strategy", "ddmin", "--max-trials", "7", "--seed", "4", "--steps", "9")
    assert (faked.options["strategy"], faked.options["max_trials"], faked.options["verify"]) == ("ddmin", 7, True)
    assert (faked.configs[0].train.seed, faked.configs[0].train.steps) == (4, 9)
    assert faked.options["known"] is None


def test_a_changed_source_file_is_refused_with_the_reason(here: Here, fake: Fake) -> None:
    fake()

    def stale(config: Config, **options: Any) -> Suggestion:
        raise WorkloadError("model.py has changed since the record was made")

    here.monkeypatch.setattr(suggestions, "suggest", stale)
    result = here.refused("suggest-fp32", "config.yaml", "--quiet")
    assert result.stderr == "error: model.py has changed since the record was made\n"


# From Python


def test_suggest_fp32_from_python_returns_the_record_and_writes_no_file(here: Here, fake: Fake) -> None:
    faked = fake()
    assert ampdbg.suggest_fp32("config.yaml") == faked.found.record
    assert not Path(".ampdbg").exists()
    assert Path("model.py").read_bytes() == BEFORE


def test_suggest_fp32_from_python_applies_the_patch_and_refuses_changed_files(here: Here, fake: Fake) -> None:
    fake()
    ampdbg.suggest_fp32("config.yaml", apply=True)
    assert Path("model.py").read_bytes() == AFTER
    with pytest.raises(PatchError, match="has changed since the patch was made") as caught:
        ampdbg.suggest_fp32("config.yaml", apply=True)
    assert isinstance(caught.value.record, Record)


def test_an_error_during_the_run_carries_a_record_with_findings(here: Here, fake: Fake) -> None:
    fake()

    def fails(config: Config, **options: Any) -> Suggestion:
        error = AmpdbgError("stopped")
        error.record = replace(found(), search=None, findings=(), verdict="inconclusive")
        raise error

    here.monkeypatch.setattr(suggestions, "suggest", fails)
    with pytest.raises(AmpdbgError) as caught:
        ampdbg.suggest_fp32("config.yaml")
    assert isinstance(caught.value.record, Record)
    assert caught.value.record.findings
    assert here("suggest-fp32", "config.yaml").code == 2
    assert read_record(saved("*-suggest-fp32.json")).findings
