"""A suggestion as text: what git and patch make of the diff, what Python makes of the module, what JSON holds."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from ampdbg.patch.file_edits import FileEdit, base_folder
from ampdbg.proof.suggestion import Suggestion
from ampdbg.record.pins import Form, Handover, PatchUnit
from ampdbg.report import suggestion as suggestions
from tests.commands.suggestions import AFTER, BEFORE, handed_over, proven, suggestion


def text_of(found: Suggestion, form: Form = "diff") -> bytes:
    text = suggestions.content(replace(found.record, handover=replace(handover_of(found), form=form)))
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


def content(folder: Path) -> tuple[bytes, bytes]:
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


def test_the_proof_stands_above_the_diff(tmp_path: Path) -> None:
    assert text_of(suggestion(tmp_path)).decode().startswith(HEAD)


def test_without_a_proof_the_diff_says_so(tmp_path: Path) -> None:
    found = suggestion(tmp_path, record=replace(proven(), verification=None))
    lines = text_of(found).decode().splitlines()
    assert "# Not proven: --no-verify was given, and nothing was run with this patch." in lines
    assert not any("Proven by" in line for line in lines)


def test_many_pins_are_counted(tmp_path: Path) -> None:
    names = tuple(f"blocks.{n}.attn" for n in range(12))
    found = suggestion(tmp_path)
    unit = PatchUnit("line 2 of model.py", names)
    handed = replace(handover_of(found), names=names, units=(unit,))
    found = replace(found, record=replace(found.record, handover=handed))
    first = text_of(found).decode().splitlines()[0]
    assert first == "# Keeps in FP32 under autocast: 12 modules, blocks.0.attn to blocks.11.attn."


def test_git_applies_it_and_takes_it_back(repository: Path) -> None:
    found = suggestion(repository / "project")
    base, is_git = base_folder(found.edits, repository / "project" / "parts")
    assert (base, is_git) == (repository, True)
    text = text_of(found)
    run(repository, "git", "apply", text=text)
    assert content(repository / "project") == (AFTER, AFTER)
    run(repository, "git", "apply", "-R", text=text)
    assert content(repository / "project") == (BEFORE, BEFORE)


def test_git_applies_it_from_a_folder_below_the_root(repository: Path) -> None:
    found = suggestion(repository / "project")
    run(repository / "project", "git", "apply", text=text_of(found))
    assert content(repository / "project") == (AFTER, AFTER)


def test_git_applies_it_outside_of_a_repository(tmp_path: Path) -> None:
    found = suggestion(tmp_path.resolve())
    base, is_git = base_folder(found.edits, tmp_path)
    assert (base, is_git) == (tmp_path.resolve(), False)
    run(tmp_path, "git", "apply", text=text_of(found))
    assert content(tmp_path) == (AFTER, AFTER)


@needs_patch
def test_patch_applies_it_and_takes_it_back(tmp_path: Path) -> None:
    text = text_of(suggestion(tmp_path))
    run(tmp_path, "patch", "-p1", text=text)
    assert content(tmp_path) == (AFTER, AFTER)
    run(tmp_path, "patch", "-p1", "-R", text=text)
    assert content(tmp_path) == (BEFORE, BEFORE)


HARD = {
    "CRLF": (b"a = 1\r\nb = 2\r\n", b"a = 1\r\nb = 3\r\n"),
    "latin-1": (b"# -*- coding: latin-1 -*-\nname = 'M\xfcller'\n", b"# -*- coding: latin-1 -*-\nname = 'M\xfcnch'\n"),
    "no newline at the end": (b"a = 1", b"a = 2"),
    "a line like a header": (b"x = 1\n-- a/model.py\n", b"x = 2\n-- a/model.py\n"),
}


@pytest.mark.parametrize("name", HARD)
def test_every_byte_is_kept(name: str, tmp_path: Path) -> None:
    before, after = HARD[name]
    file = tmp_path.resolve() / "model.py"
    file.write_bytes(before)
    found = handed_over(proven(), tmp_path, FileEdit(file, before, after))
    file.write_bytes(before)
    run(tmp_path, "git", "apply", text=text_of(found))
    assert file.read_bytes() == after


def test_a_proof_that_looks_like_a_diff_does_no_harm(tmp_path: Path) -> None:
    found = suggestion(tmp_path)
    proof = proven().verification
    assert proof is not None
    odd = replace(proof.steps[0], detail="line\n--- a/model.py\n+++ b/model.py\n@@ -1 +1 @@\n-def\ndiff --git a/x b/x")
    found = replace(found, record=replace(found.record, verification=replace(proof, steps=(odd,))))
    run(tmp_path, "git", "apply", text=text_of(found))
    assert content(tmp_path) == (AFTER, AFTER)


def test_files_beside_the_configs_folder_are_named_from_what_holds_both(tmp_path: Path) -> None:
    found = suggestion(tmp_path / "source")
    (tmp_path / "configs").mkdir()
    assert base_folder(found.edits, tmp_path / "configs") == (tmp_path.resolve(), False)
    beside = handed_over(proven(), tmp_path / "configs", *found.edits)
    assert b"--- a/source/model.py" in text_of(beside)


@pytest.mark.parametrize("edited", ["workload.py", "clone/model.py", "clone/parts/train.py"])
@pytest.mark.parametrize("is_repository", [True, False])
def test_the_paths_count_from_one_folder_wherever_the_edits_fall(
    edited: str, is_repository: bool, tmp_path: Path
) -> None:
    """A clone beside the config is a repository of its own."""
    folder = tmp_path.resolve()
    file = folder / edited
    for repository in [folder] * is_repository + [folder / "clone"]:
        repository.mkdir(exist_ok=True)
        run(repository, "git", "init", "-q")
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(BEFORE)
    found = handed_over(proven(), folder, FileEdit(file, BEFORE, AFTER))
    assert base_folder(found.edits, folder) == (folder, is_repository)
    run(folder, "git", "apply", text=text_of(found))
    assert file.read_bytes() == AFTER


# The other forms


class Net(nn.Module):
    """Two blocks that the hand-made pins name."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential() for _ in range(4))
        self.blocks[2].add_module("attn", nn.Linear(2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[2](x)


def test_the_module_is_python_that_pins(tmp_path: Path) -> None:
    text = text_of(suggestion(tmp_path), "module").decode()
    assert text.startswith(
        "# Keeps in FP32 under autocast: blocks.2.attn, blocks.3 (its own lines).\n# Proven by ampdbg "
    )
    scope: dict[str, object] = {}
    exec(compile(text, "ampdbg_pins.py", "exec"), scope)  # as an import would
    pin = scope["pin_fp32"]
    assert callable(pin)
    net = Net()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert net(torch.ones(1, 2)).dtype is torch.bfloat16
        assert pin(net)(torch.ones(1, 2)).dtype is torch.float32


def test_json_has_the_pins_the_diffs_and_the_proof(tmp_path: Path) -> None:
    found = suggestion(tmp_path)
    data = json.loads(text_of(found, "json"))
    assert (data["format"], data["version"], data["names"]) == ("ampdbg.patch", 1, ["blocks.2.attn", "blocks.3:own"])
    assert [pin["module"] for pin in data["pins"]] == ["blocks.2.attn", "blocks.3"]
    assert [file["path"] for file in data["files"]] == ["model.py", "parts/train.py"]
    assert data["units"][0] == {"title": "line 2 of model.py", "pins": ["blocks.2.attn"], "notes": []}
    assert data["proof"]["passed"] is True
    assert data["notes"] == list(handover_of(found).notes)


@pytest.mark.parametrize("name", HARD)
def test_the_diffs_in_json_are_exact(name: str, tmp_path: Path) -> None:
    before, after = HARD[name]
    file = tmp_path.resolve() / "model.py"
    found = handed_over(proven(), tmp_path, FileEdit(file, before, after))
    file.write_bytes(before)
    (entry,) = json.loads(text_of(found, "json"))["files"]
    run(tmp_path, "git", "apply", text=entry["diff"].encode(entry["encoding"]))
    assert file.read_bytes() == after


def test_what_the_reader_of_a_unit_must_know_stands_below_it(tmp_path: Path) -> None:
    found = suggestion(tmp_path)
    first, *others = handover_of(found).units
    told = replace(first, notes=("line 2 of model.py cannot be edited: a lambda", "applies to all 24 instances of GLU"))
    record = replace(found.record, handover=replace(handover_of(found), units=(told, *others)))
    text = text_of(replace(found, record=record)).decode()
    lines = [
        "#   - line 2 of model.py",
        "#     line 2 of model.py cannot be edited: a lambda",
        "#     applies to all 24 instances of GLU",
    ]
    assert "\n".join(lines) in text
