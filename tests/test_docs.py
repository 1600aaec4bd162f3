"""Tests that the documentation matches the code: every command, code, key and link."""

import functools
import os
import re
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest
import torch
import yaml

import ampdbg
from ampdbg.commands.app import COMMANDS
from ampdbg.config.schema import ConfigFile
from ampdbg.lint.settings import read_settings
from ampdbg.record.codes import CODES
from ampdbg.record.file import read_record
from ampdbg.report.explanation import explanation
from scripts.docs_pages import TABLES, printed_help, with_tables
from tests.commands.program import start
from tests.report.pages import rendered

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SCREENS = DOCS / "screens"


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built pages; mkdocs.yml makes a broken link an error."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


def text_of(page: Path) -> str:
    return " ".join(unescape(re.sub(r"<[^>]+>", "", page.read_text(encoding="utf-8"))).split())


def test_every_command_has_a_page_with_its_help(site: Path) -> None:
    for name in COMMANDS:
        assert f"Usage: ampdbg {name} [OPTIONS]" in text_of(site / "commands" / name / "index.html")
    listing = (site / "commands" / "index.html").read_text(encoding="utf-8")
    assert all(f'href="{name}/"' in listing for name in COMMANDS)


def test_every_code_has_a_page_with_its_explanation(site: Path) -> None:
    for name in CODES:
        text = text_of(site / "codes" / name / "index.html")
        assert explanation(name).title.replace("`", "") in text
        assert "What fixes it" in text
    assert 'href="../silent-overflow/"' in (site / "codes" / "precision-loss" / "index.html").read_text("utf-8")


def test_every_key_of_the_config_is_described(site: Path) -> None:
    rows = re.findall(r"<tr>\s*(.*?)</tr>", (site / "config" / "index.html").read_text(encoding="utf-8"), re.DOTALL)
    cells = [[unescape(re.sub(r"<[^>]+>", "", cell)) for cell in re.findall(r"<td>(.*?)</td>", row)] for row in rows]
    known = {row[0]: row for row in cells if len(row) == 4}
    assert set(ConfigFile.model_fields) <= known.keys()
    assert {"precision.loss_scale.growth_interval", "train.device", "checkpoint.optimizer"} <= known.keys()
    assert known["train.steps"] == ["train.steps", "optimizer steps", "a whole number of at least 1, below 2**63", "50"]
    assert [row[0] for row in known.values() if not row[2]] == []


def test_pages_load_nothing_from_other_hosts(site: Path) -> None:
    for page in (site / "index.html", site / "tutorial" / "vit" / "index.html"):
        loaded = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?:[^"]+)"', page.read_text(encoding="utf-8"))
        assert loaded == []


@pytest.mark.parametrize("path", sorted(SCREENS.glob("*.svg")), ids=lambda path: path.stem)
def test_a_screen_picture_shows_the_text_of_the_screen_and_loads_nothing(path: Path) -> None:
    picture = path.read_text(encoding="utf-8")
    shown = " ".join(unescape(re.sub(r"<[^>]+>", " ", picture)).replace("\xa0", " ").split())
    screen = path.with_suffix(".txt").read_text(encoding="utf-8").splitlines()
    assert all(" ".join(line.split())[:60] in shown for line in screen if len(line) < 80)
    assert "url(http" not in picture
    assert "@font-face" not in picture


def test_screens_contain_no_path_of_this_machine() -> None:
    for path in SCREENS.glob("*.txt"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"/(tmp|home|root|work)/", text), path


def without_values(text: str) -> str:
    return re.sub(r"\d{1,3}(,\d{3})+", "VALUE", text)


def test_the_finding_on_the_scan_screen_is_the_output_of_scan() -> None:
    screen = (SCREENS / "scan.txt").read_text(encoding="utf-8")
    config = screen.partition("\n")[0].removeprefix("$ ampdbg scan ")
    text = rendered(ampdbg.scan(ROOT / config, steps=1), folder=str(ROOT))
    start, end = "error forward-overflow", "  ampdbg explain forward-overflow\n"
    # The example trains on a text of Python itself, which other releases word differently.
    assert without_values(text[text.index(start) : text.index(end)]) in without_values(screen)
    assert end in screen


def test_the_readme_shows_the_screen_of_the_documentation() -> None:
    screen = (SCREENS / "run.txt").read_text(encoding="utf-8")
    assert f"```console\n{screen}```" in (ROOT / "README.md").read_text(encoding="utf-8")


PAGES = {str(path.relative_to(DOCS)): path.read_text(encoding="utf-8") for path in sorted(DOCS.rglob("*.md"))}


def test_tables_made_from_the_code_are_up_to_date() -> None:
    for name, text in PAGES.items():
        assert with_tables(text) == text, f"docs/{name} is older than the code; run: make docs"
    made = {table for text in PAGES.values() for table in re.findall(r"<!-- made from the code: (.*?) -->", text)}
    assert set(TABLES) <= made
    assert [name for name in made - set(TABLES) if not (DOCS / name).is_file()] == []


@pytest.mark.parametrize("page", ["python.md"])
def test_the_python_examples_of_a_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(3, 1)
    given = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "path": "record.json"}
    for example in re.findall(r"^```python\n(.*?)^```", PAGES[page], re.DOTALL | re.MULTILINE):
        exec(example, {**given, "train": train})
    assert len(read_record(tmp_path / "record.json").steps) == 1


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 3)).square().mean().backward()
    optimizer.step()


def test_the_config_example_is_a_valid_config() -> None:
    [example] = re.findall(r"^```yaml\n(model:.*?)^```", PAGES["config.md"], re.DOTALL | re.MULTILINE)
    assert ConfigFile.model_validate(yaml.safe_load(example)).model.args == {"depth": 12}


def test_the_pyproject_example_of_lint_is_read_as_settings(tmp_path: Path) -> None:
    [example] = re.findall(r"^```toml\n(.*?)^```", PAGES["lint.md"], re.DOTALL | re.MULTILINE)
    (tmp_path / "pyproject.toml").write_text(example, encoding="utf-8")
    settings = read_settings([str(tmp_path)])
    assert (settings.ignore, settings.exclude) == (("deprecated-amp",), ("third_party",))


@pytest.mark.parametrize("page", [name for name in PAGES if "`ampdbg " in PAGES[name] or "```sh" in PAGES[name]])
def test_commands_and_options_named_on_a_page_exist(page: str) -> None:
    typed = re.findall(r"^```sh\n(.*?)^```", PAGES[page], re.DOTALL | re.MULTILINE)
    typed += re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", PAGES[page], flags=re.DOTALL | re.MULTILINE))
    for verb, given in re.findall(r"ampdbg ([a-z][a-z0-9-]*)([^\n#|>&]*)", "\n".join(typed)):
        assert verb in COMMANDS
        assert set(re.findall(r"--[a-z][a-z0-9-]+", given)) - {"--its", "--arguments"} <= options_of(verb)
    alone = {option for code in typed for option in re.findall(r"^(--[a-z][a-z0-9-]+)", code)}
    assert alone <= {option for verb in COMMANDS for option in options_of(verb)}


@functools.cache
def options_of(verb: str) -> set[str]:
    return set(re.findall(r"--[a-z][a-z0-9-]+", printed_help(verb)))


ACTION = yaml.safe_load((DOCS / "github-action.yml").read_text(encoding="utf-8"))
STEPS = {step["name"]: step["run"] for step in ACTION["jobs"]["fp16"]["steps"] if "name" in step}


@pytest.mark.slow  # five runs of a program that imports torch
@pytest.mark.skipif(os.name == "nt", reason="the steps are shell scripts")
def test_the_github_action_passes_a_harmless_change_and_stops_an_overflow(tmp_path: Path) -> None:
    """Runs the unchanged steps of the workflow in a repository whose branch adds an overflow."""
    start(tmp_path, "init")
    model = tmp_path / "workload.py"
    git(tmp_path, "init", "-q", "-b", "main")
    git(tmp_path, "add", "workload.py", "ampdbg.yaml")
    git(tmp_path, "commit", "-qm", "main")
    git(tmp_path, "update-ref", "refs/remotes/origin/main", "HEAD")
    code = model.read_text(encoding="utf-8")
    harmless = code.replace("import torch\n", "import torch\n\n# A comment.\n", 1)
    for changed, codes in (
        (harmless, [0, 0, 0, 0]),
        (code.replace("self.body(images)", "self.body(images) * 3e4"), [0, 1, 0, 1]),
    ):
        git(tmp_path, "checkout", "-q", "-B", "change", "main")
        model.write_text(changed, encoding="utf-8")
        git(tmp_path, "commit", "-qam", "change")
        assert [step(tmp_path, script) for script in STEPS.values()] == codes
    summary = (tmp_path / "summary.md").read_text(encoding="utf-8")
    assert "### ✓ Not worse" in summary
    assert "### ✗ Worse: forward-overflow" in summary
    assert '"ruleId": "forward-overflow"' in (tmp_path / "ampdbg.sarif").read_text(encoding="utf-8")


def git(folder: Path, *arguments: str) -> None:
    who = ("-c", "user.name=me", "-c", "user.email=me@example.com")
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True)


def step(folder: Path, script: str) -> int:
    """Runs a step as GitHub does with `shell: bash`, with the program of this checkout."""
    program = f'ampdbg() {{ PYTHONPATH={ROOT} "{sys.executable}" -m ampdbg "$@"; }}\n'
    variables = {**os.environ, "GITHUB_STEP_SUMMARY": str(folder / "summary.md"), "GITHUB_BASE_REF": "main"}
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", program + script]
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, check=False).returncode


@pytest.mark.slow
def test_the_options_in_the_github_action_exist(tmp_path: Path) -> None:
    for script in STEPS.values():
        for verb, rest in re.findall(r"ampdbg (\w+)([^|\n]*)", script):
            printed = start(tmp_path, verb, "--help").stdout
            assert all(option in printed for option in re.findall(r"--\w+", rest.partition(">>")[0]))
