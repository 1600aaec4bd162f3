"""``ampdbg lint``: output, fixes, settings, formats, notebooks, and files that it cannot read."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ampdbg.lint import engine
from ampdbg.lint.settings import Settings
from tests.commands.program import ROOT, Here, imported_by, start_fresh
from tests.report.test_sarif import mistakes

CLIPS = """\
import torch

def train(model, optimizer, loader):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda"):
            loss = model(x)
        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
"""
CLIP = "        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
FIXED = CLIPS.replace(CLIP, f"        scaler.unscale_(optimizer)\n{CLIP}")
OLD = "from torch.cuda.amp import autocast\n\nwith autocast():\n    pass\n"
ATTEND = "def attend(scores, mask):\n    scores = scores.masked_fill(mask, -1e9)\n    return scores.softmax(-1)\n"


def codes(here: Here, *arguments: str) -> list[str]:
    return [finding["code"] for finding in as_json(here, *arguments)["findings"]]


def as_json(here: Here, *arguments: str) -> Any:
    return json.loads(here("lint", "--format", "json", *arguments).stdout)


def write(here: Here, name: str, text: str | bytes) -> Path:
    path = here.folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_a_finding_prints_its_line_and_remedy_and_exits_with_1(here: Here) -> None:
    write(here, "train.py", CLIPS)
    done = here("lint", "train.py")
    assert (done.code, done.stderr) == (1, "")
    assert done.stdout == (
        "✗ 1 finding in 1 file; 1 can be fixed.\n"
        "\n"
        "train.py:10:9 error misuse-clip-scaled [fix]\n"
        "    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
        "  the code clips gradients that still carry the loss scale, so they end up far\n"
        "  below the limit\n"
        "  Remedy: clip after unscaling: scaler.unscale_(optimizer), then\n"
        "  clip_grad_norm_, then scaler.step(optimizer); with Accelerate,\n"
        "  accelerator.clip_grad_norm_ unscales and clips\n"
        "\n"
        "Next: see the fixes\n"
        "  ampdbg lint --diff train.py\n"
    )


def test_lint_exits_with_0_if_nothing_is_found(here: Here) -> None:
    write(here, "train.py", FIXED)
    done = here("lint", ".")
    assert (done.code, done.stdout) == (0, "✓ Nothing found in 1 file.\n")


def test_an_info_finding_is_shown_and_exits_with_0(here: Here) -> None:
    scheduled = "    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)\n    for x"
    text = FIXED.replace("    for x", scheduled) + "        scheduler.step()\n"
    write(here, "train.py", text)
    done = here("lint", "train.py")
    assert done.code == 0
    assert "info misuse-scheduler-on-skip" in done.stdout


def test_diff_prints_a_patch_for_git_apply_and_writes_nothing(here: Here) -> None:
    path = write(here, "train.py", CLIPS)
    done = here("lint", "--diff", "train.py")
    assert done.code == 1
    assert path.read_text() == CLIPS
    subprocess.run(["git", "apply", "-"], input=done.stdout.encode(), cwd=here.folder, check=True)
    assert path.read_text() == FIXED
    assert here("lint", "--diff", "train.py").code == 0


def test_fix_keeps_the_encoding_line_endings_and_mode_of_the_file(here: Here) -> None:
    text = "# -*- coding: latin-1 -*-\n# Gr\u00f6\u00dfe\n" + CLIPS.replace("1.0)", "1.0)\t# \u00a0\f ")
    path = write(here, "train.py", text.replace("\n", "\r\n").encode("latin-1"))
    path.chmod(0o755)
    done = here("lint", "--fix", "train.py")
    assert (done.code, done.stdout) == (0, "✓ 1 file fixed. Nothing found in 1 file.\n")
    line = "        torch"
    expected = text.replace(line, f"        scaler.unscale_(optimizer)\n{line}").replace("\n", "\r\n")
    assert path.read_bytes() == expected.encode("latin-1")
    assert path.stat().st_mode & 0o777 == 0o755
    assert here("lint", "--fix", "train.py").stdout == "✓ Nothing found in 1 file.\n"


def test_select_and_ignore_take_codes_and_prefixes_of_codes(here: Here) -> None:
    write(here, "train.py", CLIPS)
    write(here, "old.py", OLD)
    assert codes(here, ".") == ["deprecated-amp", "misuse-clip-scaled"]
    assert codes(here, ".", "--select", "misuse") == ["misuse-clip-scaled"]
    assert codes(here, ".", "--ignore", "misuse-clip-scaled,apex") == ["deprecated-amp"]
    assert codes(here, ".", "--select", "misuse", "--select", "deprecated", "--ignore", "deprecated") == [
        "misuse-clip-scaled"
    ]


@pytest.mark.parametrize(
    ("comment", "left"),
    [
        ("# ampdbg: ignore", []),
        ("# ampdbg: ignore[misuse-clip-scaled]", []),
        ("# why not  # ampdbg:ignore[misuse-bce, misuse-clip-scaled]", []),
        ("# ampdbg: ignore[misuse-bce]", ["misuse-clip-scaled"]),
        ("# ignore", ["misuse-clip-scaled"]),
    ],
)
def test_an_ignore_comment_covers_its_whole_line_or_the_named_codes(here: Here, comment: str, left: list[str]) -> None:
    write(here, "train.py", CLIPS.replace("1.0)\n", f"1.0)  {comment}\n"))
    assert codes(here, "train.py") == left


def test_a_fix_that_would_also_repair_an_ignored_finding_is_not_made(here: Here) -> None:
    text = OLD + "\nwith autocast():  # ampdbg: ignore\n    pass\n"
    path = write(here, "old.py", text)
    (finding,) = as_json(here, "old.py")["findings"]
    assert (finding["line"], finding["fixable"]) == (3, False)
    here("lint", "--fix", "old.py")
    assert path.read_text() == text


@pytest.mark.parametrize("text", ['f"{autocast()}"', "f'{autocast()}' \"\"", 'f"""\n{autocast()}"""'])
def test_a_finding_inside_an_f_string_is_not_fixable(here: Here, text: str) -> None:
    source = f"from torch.cuda.amp import autocast\n\nx = {text}\n"
    path = write(here, "a.py", source)
    assert [one["fixable"] for one in as_json(here, "a.py")["findings"]] == [False]
    assert here("lint", "--diff", "a.py").stdout == ""
    done = here("lint", "--fix", "a.py")
    assert (done.code, "can be fixed" in done.stdout, path.read_text()) == (1, False, source)


def test_fix_repairs_the_code_after_an_unfixable_f_string(here: Here) -> None:
    source = 'import torch\n\nx = f"{torch.cuda.amp.autocast()}"\n'
    path = write(here, "a.py", source + CLIPS)
    assert [one["fixable"] for one in as_json(here, "a.py")["findings"]] == [False, True]
    here("lint", "--fix", ".")
    assert path.read_text() == source + FIXED


def test_pyproject_sets_ignore_and_exclude_and_the_ignore_option_replaces_its_list(here: Here) -> None:
    write(here, "a.py", CLIPS)
    write(here, "made/b.py", CLIPS)
    write(here, "old.py", OLD)
    write(here, "pyproject.toml", '[tool.ampdbg.lint]\nignore = ["deprecated"]\nexclude = ["made"]\n')
    assert codes(here, ".") == ["misuse-clip-scaled"]
    assert codes(here, ".", "--ignore", "misuse") == ["deprecated-amp"]


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("selct = []", "selct: no such key; allowed: select, ignore, exclude"),
        ('select = "misuse"', "select: got 'misuse'; needed: a list of strings"),
        ('ignore = ["misuse-typo"]', "ignore: 'misuse-typo' is no code of a rule; allowed: "),
    ],
)
def test_a_mistake_in_pyproject_is_reported_with_its_key(here: Here, table: str, said: str) -> None:
    write(here, "pyproject.toml", f"[tool.ampdbg.lint]\n{table}\n")
    done = here("lint", ".")
    assert done.code == 2
    assert f"pyproject.toml: [tool.ampdbg.lint] {said}" in done.stderr


@pytest.mark.parametrize(
    ("file", "text", "is_told"),
    [
        ("requirements.txt", "numpy\ntorch>=1.13\n", False),
        ("requirements.txt", "torch==2.3.1\ntorchvision\n", False),
        ("requirements.txt", "torch>=2.4\n", True),
        ("requirements.txt", "torchmetrics>=0.5\n", True),
        ("pyproject.toml", '[project]\ndependencies = ["numpy", "torch>=2.0"]\n', False),
        ("setup.py", 'setup(install_requires=[\n    "torch >= 1.7",\n])\n', False),
    ],
)
def test_a_deprecated_spelling_is_not_reported_if_the_project_allows_an_older_torch(
    here: Here, file: str, text: str, is_told: bool
) -> None:
    write(here, "old.py", OLD)
    write(here, file, text)
    assert codes(here, ".") == ["deprecated-amp"] * is_told


def test_a_mask_constant_is_reported_only_if_its_project_trains_in_half_precision(here: Here) -> None:
    write(here, "one/requirements.txt", "torch\n")
    write(here, "one/model.py", ATTEND)
    write(here, "two/requirements.txt", "torch\n")
    write(here, "two/model.py", ATTEND)
    write(here, "two/train.py", FIXED)
    (found,) = as_json(here, ".")["findings"]
    assert (found["path"], found["code"], found["severity"]) == ("two/model.py", "mask-constant", "warning")
    here("lint", "--fix", "two")
    assert "torch.finfo(scores.dtype).min" in (here.folder / "two/model.py").read_text()
    assert (here.folder / "two/model.py").read_text().startswith("import torch\n")


@pytest.mark.parametrize("mark", ["", "requirements.txt", "pack/requirements.txt"])
def test_findings_do_not_depend_on_the_way_the_paths_are_given(here: Here, mark: str) -> None:
    write(here, "pack/deep/model.py", ATTEND)
    write(here, "train.py", FIXED)
    if mark:
        write(here, mark, "torch\n")
    is_one_project = "pack" not in mark
    deep = str(here.folder / "pack/deep")
    ways = ["."], ["pack", "train.py"], ["train.py", "pack/deep/model.py"], [deep, "train.py"]
    for given in ways:
        assert codes(here, *given) == ["mask-constant"] * is_one_project


# Formats


def test_json_has_the_format_the_file_count_and_the_findings(here: Here) -> None:
    write(here, "train.py", CLIPS)
    found = as_json(here, "train.py")
    assert (found["format"], found["version"], found["files"], found["problems"]) == ("ampdbg.lint", 1, 1, [])
    (finding,) = found["findings"]
    assert (finding["line"], finding["column"], finding["severity"], finding["fixable"]) == (10, 9, "error", True)


def test_the_github_format_places_a_finding_at_its_line(here: Here) -> None:
    write(here, "a,b.py", CLIPS)
    done = here("lint", "--format", "github", "a,b.py")
    assert done.stdout.startswith("::error file=a%2Cb.py,line=10,col=9,title=misuse-clip-scaled::the code clips ")
    assert done.stdout.count("\n") == 1


def test_sarif_output_is_valid_and_places_the_finding_at_its_line(here: Here) -> None:
    write(here, "train.py", CLIPS)
    log = json.loads(here("lint", "--format", "sarif", ".").stdout)
    assert mistakes(log) == []
    (result,) = log["runs"][0]["results"]
    place = result["locations"][0]["physicalLocation"]
    assert result["ruleId"] == "misuse-clip-scaled"
    assert (place["artifactLocation"]["uri"], place["region"]["startLine"]) == ("train.py", 10)


# Notebooks


def notebook(*cells: str) -> str:
    made: list[object] = [{"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": [],
             "source": cell.splitlines(keepends=True)} for cell in cells]  # fmt: skip
    text = {"cell_type": "markdown", "metadata": {}, "source": ["# Größe\n"]}
    book = {"cells": [text, *made], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(book, indent=1, ensure_ascii=False) + "\n"


def test_a_notebook_is_linted_across_cells_and_fixed_in_its_own_format(here: Here) -> None:
    first, magic = "%matplotlib inline\n!pip install torch\nimport torch", "%%bash\nnot python"
    path = write(here, "train.ipynb", notebook(first, magic, CLIPS))
    (finding,) = as_json(here, ".")["findings"]
    assert (finding["cell"], finding["line"]) == (4, 10)
    assert "train.ipynb:cell 4:10:9 error" in here("lint", ".").stdout
    assert here("lint", "--fix", ".").code == 0
    assert path.read_text("utf-8") == notebook(first, magic, FIXED)


def test_a_notebook_that_cannot_be_fixed_in_its_own_format_is_left_unchanged(here: Here) -> None:
    path = write(here, "train.ipynb", notebook(CLIPS).replace("\n", ""))
    done = here("lint", "--fix", ".")
    assert "train.ipynb cannot be fixed in its own format" in done.stderr
    assert done.code == 1
    assert path.read_text("utf-8") == notebook(CLIPS).replace("\n", "")


# Files that cannot be read


UNPARSABLE = "import torch\n\ndef train(:\n    pass\n"


@pytest.mark.parametrize(("name", "text"), [("train.py", UNPARSABLE), (".", f"{UNPARSABLE}# float16\n")])
def test_a_file_that_cannot_be_parsed_is_not_read_and_exits_with_2(here: Here, name: str, text: str) -> None:
    write(here, "train.py", text)
    done = here("lint", name)
    assert (done.code, done.stdout) == (
        2,
        "? 1 of 1 file could not be read.\n\nNot read\n  train.py: line 3 does not parse: invalid syntax\n",
    )
    annotated = here("lint", name, "--format", "github")
    said = "::warning file=train.py,title=Not read::line 3 does not parse: invalid syntax\n"
    assert (annotated.code, annotated.stdout) == (2, said)
    write(here, "other.py", FIXED)
    done = here("lint", name, "other.py")
    assert (done.code, done.stdout.partition("\n")[0]) == (
        2,
        "? 1 of 2 files could not be read; nothing found in the others.",
    )
    write(here, "train.py", text.replace("(:", "():"))
    done = here("lint", name)
    assert (done.code, done.stdout.partition(" in ")[0]) == (0, "✓ Nothing found")


def test_torchs_clip_behind_accelerates_backward_becomes_accelerates_own(here: Here) -> None:
    clips = "    torch.nn.utils.clip_grad_norm_(model.parameters(), {}1.0)\n    optimizer.step()\n"
    text = (
        "import torch\nfrom accelerate import Accelerator\n\naccelerator = Accelerator(mixed_precision='fp16')\n"
        "for x in loader:\n    accelerator.backward(model(x).mean())\n"
    )
    write(here, "train.py", text + clips.format(""))
    done = here("lint", "train.py")
    assert done.code == 1
    assert "Remedy: clip with accelerator.clip_grad_norm_, which unscales the gradients" in done.stdout
    here("lint", "--fix", "train.py")
    own = "    accelerator.clip_grad_norm_(model.parameters(), 1.0)\n    optimizer.step()\n"
    assert (here.folder / "train.py").read_text() == text + own
    assert here("lint", "train.py").code == 0
    write(here, "train.py", text + clips.format("foreach=True, max_norm="))  # which Accelerate does not take
    here("lint", "--fix", "train.py")
    assert (here.folder / "train.py").read_text() == text + clips.format("foreach=True, max_norm=")


def test_each_file_that_cannot_be_read_or_parsed_has_a_problem_of_one_line(here: Here) -> None:
    write(here, "python2.py", f"{OLD}print 'autocast'\n")
    write(here, "bytes.py", OLD.encode() + b"# \xff\n")
    write(here, "cookie.py", f"# coding: klingon\n{OLD}")
    write(here, "null.py", OLD.encode() + b"x = '\x00'\n")
    # No Python parses this depth; 3.10 and 3.13 do parse 5000.
    write(here, "deep.py", f"{OLD}x = {'-' * 20_000}1\n")
    write(here, "huge.py", OLD.encode() * 40_000)
    write(here, "book.ipynb", OLD)
    (here.folder / "gone.py").symlink_to("nowhere.py")
    (here.folder / "self.py").symlink_to("self.py")
    (here.folder / "below").mkdir()
    (here.folder / "below" / "up").symlink_to("..", target_is_directory=True)
    write(here, "train.py", FIXED)
    found = as_json(here, ".")
    problems = {one["path"]: one["problem"] for one in found["problems"]}
    assert set(problems) == {
        "python2.py", "bytes.py", "cookie.py", "null.py", "deep.py", "huge.py", "book.ipynb", "gone.py", "self.py",
    }  # fmt: skip
    assert problems["python2.py"].startswith("line 5 does not parse: ")
    assert problems["deep.py"] == "does not parse: it is nested too deeply"
    assert problems["huge.py"] == "cannot be read: larger than 2,000,000 bytes"
    assert problems["gone.py"] == "cannot be read: No such file or directory"
    assert problems["self.py"].startswith("cannot be read: Too many levels of symbolic links")
    assert [one["path"] for one in found["findings"] if one["path"].startswith("below")] == [], "a linked folder"
    assert problems["book.ipynb"] == "is no notebook of version 4"
    assert all("\n" not in problem and problem for problem in problems.values())
    done = here("lint", ".")
    assert done.code == 2
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() == 0, reason="nothing is unreadable for root")
def test_a_file_without_read_permission_is_reported(here: Here) -> None:
    write(here, "train.py", CLIPS).chmod(0)
    assert [one["problem"] for one in as_json(here, ".")["problems"]] == ["cannot be read: Permission denied"]


def test_a_folder_with_nothing_to_lint_is_an_error(here: Here) -> None:
    write(here, "docs/index.md", OLD)
    write(here, "docs/.hidden/old.py", OLD)
    done = here("lint", "docs")
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr.startswith("error: docs: no Python file or notebook there; ampdbg lint ignores hidden folders, ")
    write(here, "pyproject.toml", '[tool.ampdbg.lint]\nexclude = ["old*"]\n')
    write(here, "old/old.py", OLD)
    assert "and what pyproject.toml excludes (old*)" in here("lint", "old", "docs").stderr
    write(here, "src/new.py", FIXED)
    assert here("lint", "docs", "src").code == 0


@pytest.mark.parametrize("deep", ["-" * 50_000 + "1", "lambda: " * 5_000 + "1", "f" + "()" * 50_000])
def test_a_file_nested_too_deeply_for_the_parser_is_reported(here: Here, deep: str) -> None:
    write(here, "deep.py", f"{OLD}x = {deep}\n")
    done = here("lint", "deep.py")
    is_read = deep.startswith("f") and sys.version_info < (3, 11)  # its parser takes any number of calls in a row
    assert (done.code, done.stderr) == (1 if is_read else 2, "")
    assert ("deep.py: does not parse: it is nested too deeply" in done.stdout) != is_read


def test_a_file_reached_by_two_paths_is_linted_once(here: Here) -> None:
    path = write(here, "train.py", CLIPS)
    (here.folder / "link.py").symlink_to(path)
    assert len(codes(here, ".", "train.py")) == 1


def test_lint_with_several_processes_keeps_the_order_of_the_files(here: Here) -> None:
    for number in range(engine.ENOUGH_FOR_PROCESSES + 5):
        write(here, f"{number:03}.py", CLIPS)
    found = engine.lint([str(here.folder)], Settings())
    assert [Path(one.path).name for one in found.findings] == sorted(one.name for one in here.folder.glob("*.py"))


def test_lint_does_not_import_torch(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(CLIPS)
    done = start_fresh(tmp_path, "lint", "train.py", flags=("-X", "importtime"))
    assert done.code == 1
    assert "torch" not in imported_by(done)


# The misuses planted for the watched loop


def test_lint_blames_no_healthy_zoo_loop_and_only_the_marked_planted_lines() -> None:
    zoo = ROOT / "tests" / "zoo_misuse"
    assert engine.lint([str(zoo / "healthy.py"), str(zoo / "parts.py")], Settings()).findings == ()
    found = engine.lint([str(zoo / "planted.py")], Settings()).findings
    lines = (zoo / "planted.py").read_text("utf-8").splitlines()
    for one in found:
        marked = lines[one.line - 1].rpartition("# ")[2]
        assert marked == one.code or (one.code == "misuse-stale-gradients" and "zero_grad" in one.text)
    assert len(found) >= 12
