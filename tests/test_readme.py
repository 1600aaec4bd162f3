"""Tests that the README is short and true: its screen, patch, Python, config, commands and links."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import yaml
from torch.amp.grad_scaler import GradScaler

from ampdbg.commands.app import COMMANDS
from ampdbg.config.schema import ConfigFile
from ampdbg.record.file import read_record
from tests.commands.program import ROOT, Result, start

README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def test_the_readme_can_be_read_in_two_minutes() -> None:
    lines = README.splitlines()
    assert len(lines) <= 120
    assert max(map(len, lines)) <= 125


# The screen and the patch

[SCREEN] = blocks("console")
[PATCH] = blocks("diff")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The script of the screen, in its own git repository."""
    folder = tmp_path_factory.mktemp("clone")
    (folder / "examples").mkdir()
    shutil.copy(ROOT / "LICENSE", folder)
    shutil.copy(ROOT / "examples" / "train.py", folder / "examples")
    git(folder, "init", "-q")
    return folder


@pytest.fixture(scope="module")
def run(repository: Path) -> Result:
    """The output of the command on the screen."""
    command = SCREEN.partition("\n")[0].removeprefix("$ ampdbg ")
    return start(repository, *shlex.split(command), COLUMNS="80")


def git(folder: Path, *arguments: str, given: str = "") -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, input=given, capture_output=True, text=True, check=True)
    return done.stdout


def of_any_machine(text: str) -> list[str]:
    """The words of a screen without the parts that depend on the machine or on torch: times, versions, digits."""
    text = re.sub(r"torch \S+ · .*? autocast policy(, emulated)?", "MACHINE", " ".join(text.split()))
    text = re.sub(r"· [\d.,]+ (ms|s|min)\b", "· TIME", re.sub(r"\d{8}T\d{6}Z", "MOMENT", text))
    return re.sub(r"\d[\d.,]*", "NUMBER", text).split()


def test_the_readme_screen_is_the_output_of_the_script_and_of_ampdbg(run: Result) -> None:
    command, *lines = SCREEN.splitlines()
    of_script = [line for line in lines if re.match(r"step \d+: loss", line)]
    of_ampdbg = [line for line in lines if line not in of_script]
    assert command.startswith("$ ampdbg run --emulate examples/train.py")
    assert run.code == 1
    assert of_any_machine("\n".join(of_script)) == of_any_machine(run.stdout)
    assert of_any_machine("\n".join(of_ampdbg)) == of_any_machine(run.stderr)


def test_the_line_on_the_readme_screen_is_in_the_script(run: Result) -> None:
    found = re.search(r"examples/train\.py:(\d+) in forward\n\s+(.*)", SCREEN)
    assert found is not None
    script = (ROOT / "examples" / "train.py").read_text(encoding="utf-8").splitlines()
    assert script[int(found[1]) - 1].strip() == found[2]
    assert f"examples/train.py:{found[1]} in forward" in run.stderr


@pytest.mark.slow  # a search, a proof, and the script twice more
def test_the_readme_commands_and_patch_make_the_script_healthy(repository: Path, run: Result) -> None:
    way = next(text for text in blocks("sh") if "git apply" in text)
    assert re.findall(r"^ampdbg (\S+)", way, re.MULTILINE) == ["run", "suggest-fp32"]
    assert run.code == 1
    patched = start(repository, "suggest-fp32")
    assert patched.code == 0, patched.stderr
    assert all(line in patched.stdout.splitlines() for line in PATCH.splitlines())
    git(repository, "apply", given=patched.stdout)
    again = start(repository, "run", "--emulate", "examples/train.py")
    assert (again.code, again.stderr.partition(":")[0]) == (0, "✓ Healthy")


# The Python and the config


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    scaler = GradScaler("cpu")
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 3)).square().mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


def test_the_readme_example_of_a_watched_loop_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [example] = blocks("python")
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(3, 1)
    exec(example, {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "train": train})
    record = read_record(Path("run.json"))
    assert (record.command, record.verdict, len(record.steps)) == ("watch", "other", 3)
    assert record.findings[0].code == "misuse-clip-scaled"


def test_the_readme_example_of_a_config_is_valid() -> None:
    [example] = blocks("yaml")
    config = ConfigFile.model_validate(yaml.safe_load(example))
    assert config.model.target == "model.py:build_model"
    assert config.train.steps == 50
    assert f"trains {config.train.steps} steps" in README


# The commands and the links


def test_the_readme_table_lists_every_command() -> None:
    rows = [line for line in README.splitlines() if line.startswith("| `ampdbg ")]
    listed = {word for row in rows for word in re.findall(r"`(?:ampdbg )?([a-z][a-z0-9-]+)[^`]*`", row.split("|")[1])}
    assert listed == set(COMMANDS)


def test_the_readme_commands_and_options_exist(tmp_path: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", README, flags=re.DOTALL | re.MULTILINE)
    typed = re.findall(
        r"ampdbg ([a-z][a-z0-9-]+)((?: --[a-z-]+)*)", "\n".join(blocks("sh") + re.findall(r"`[^`\n]+`", prose))
    )
    assert {"run", "suggest-fp32", "init", "scan"} <= {verb for verb, _ in typed}
    for verb, given in set(typed):
        assert verb in COMMANDS
        printed = start(tmp_path, verb, "--help").stdout if given else ""
        assert all(option in printed for option in given.split()), (verb, given)


def test_the_readme_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^make ([a-z]+)", "\n".join(blocks("sh")), re.MULTILINE)
    assert targets == ["demo", "test"]
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_readme_links_exist() -> None:
    links = re.findall(r"\]\(([^)#]+)", README)
    assert len(links) > 8
    assert [link for link in links if not (ROOT / link).exists()] == []
