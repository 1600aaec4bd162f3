"""``ampdbg init``, ``ampdbg schema`` and shell completion, which help before the first run."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ampdbg.config.file import load_config
from ampdbg.config.schema import ConfigFile, json_schema
from ampdbg.config.yaml_document import read_yaml
from tests.commands.program import ROOT, Here, environment, start

STARTER = ROOT / "ampdbg" / "config" / "starter"


def test_init_in_an_empty_folder_writes_a_workload_that_scans_as_healthy(tmp_path: Path) -> None:
    made = start(tmp_path, "init")
    assert (made.code, made.stderr) == (0, "")
    assert made.stdout == "ampdbg.yaml\nworkload.py\nNext: ampdbg scan\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ampdbg.yaml", "workload.py"]
    scanned = start(tmp_path, "scan", "--quiet")
    assert (scanned.code, scanned.stderr) == (0, "")
    assert scanned.stdout.startswith("✓ Healthy: ")
    assert scanned.stdout.endswith("  ampdbg scan ampdbg.yaml --steps 200\n")


def test_workload_commands_use_the_config_of_the_working_folder(here: Here) -> None:
    assert "Missing argument 'CONFIG'" in here("scan").stderr
    here("init")
    for verb in ("ranges", "bisect", "suggest-fp32"):
        result = here(verb, "--quiet", "--steps", "1", "--set", "model.args.width=8", "--record", "r.json")
        assert result.code == 0, result


def test_init_creates_the_named_folder(here: Here) -> None:
    result = here("init", "a new one")
    assert result.stdout.splitlines()[-1] == "Next: cd 'a new one' && ampdbg scan"
    assert Path("a new one/ampdbg.yaml").is_file()


@pytest.mark.parametrize("name", ["ampdbg.yaml", "workload.py"])
def test_init_refuses_to_overwrite_either_file(name: str, here: Here) -> None:
    Path(name).write_text("mine", encoding="utf-8")
    result = here.refused("init")
    assert result.stderr.startswith(f"error: {name} exists already; ampdbg init overwrites nothing")
    assert [path.name for path in here.folder.iterdir()] == [name]
    assert Path(name).read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize("folder", ["file", "file/below", "n" * 300])
def test_a_folder_that_init_cannot_create_is_named(folder: str, here: Here) -> None:
    Path("file").touch()
    result = here("init", folder)
    assert (result.code, result.stderr.startswith(f"error: {folder}: cannot be written: ")) == (2, True)


@pytest.mark.skipif(sys.platform != "linux", reason="there is no device that is always full")
@pytest.mark.parametrize("folder", ["new", "old"])
def test_init_on_a_full_disk_leaves_no_files(folder: str, here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Path.open

    def full(path: Path, *how: Any, **more: Any) -> Any:
        file = opened(path, *how, **more)
        if path.name != "workload.py":
            return file
        file.close()
        return opened(Path("/dev/full"), "w")

    Path("old").mkdir()
    monkeypatch.setattr(Path, "open", full)
    result = here("init", folder)
    assert (result.code, result.stderr) == (2, f"error: {folder}: cannot be written: No space left on device\n")
    assert sorted(Path().rglob("*")) == [Path("old")]


def test_init_does_not_overwrite_a_dangling_symlink(here: Here) -> None:
    Path("ampdbg.yaml").symlink_to("nowhere")
    assert here("init").stderr.startswith("error: ampdbg.yaml exists already")


def test_folder_names_are_escaped_for_the_terminal_and_the_shell(here: Here) -> None:
    assert here("init", "a\x1b[31mb").stdout.splitlines()[0] == "a\\x1b[31mb/ampdbg.yaml"
    assert here("init", "--", "-x").stdout.splitlines()[-1] == "Next: cd ./-x && ampdbg scan"


def test_the_commented_keys_of_the_starter_config_show_their_defaults(here: Here) -> None:
    here("init")
    given = Path("ampdbg.yaml").read_text(encoding="utf-8")
    uncommented = re.sub(r"^# ( *(?:\w+): .*)$", r"\1", given, flags=re.MULTILINE)
    lines = [line for line in uncommented.splitlines() if not re.match(r"#|checkpoint:", line)]
    data = read_yaml("\n".join(lines)).data
    assert isinstance(data, dict)
    defaults = ConfigFile.model_construct().model_dump(mode="json")
    loss_scale = data["precision"].pop("loss_scale")
    assert defaults["precision"].items() >= data["precision"].items()
    assert defaults["precision"]["loss_scale"].items() >= loss_scale.items()
    assert defaults["train"].items() >= {**data["train"], "steps": 50}.items()
    assert set(data["train"]) == set(defaults["train"])
    assert set(ConfigFile.model_fields) - {"scheduler"} == {
        *data,
        *re.findall(r"^# (\w+):", given, flags=re.MULTILINE),
    } & set(ConfigFile.model_fields)
    assert "#   target: torch.optim:AdamW" in given
    assert load_config(Path("ampdbg.yaml")).train.steps == 20


def test_the_starter_workload_passes_ruff_check_and_ruff_format(tmp_path: Path) -> None:
    (tmp_path / "workload.py").write_bytes((STARTER / "workload.py.txt").read_bytes())
    for check in (("check",), ("format", "--check")):
        command = [sys.executable, "-m", "ruff", *check, "--isolated", "--line-length=120", "workload.py"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_schema_command_prints_the_json_schema(here: Here) -> None:
    result = here("schema")
    assert (result.code, result.stderr) == (0, "")
    assert json.loads(result.stdout) == json_schema()


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("ampdbg sc", {"scan", "schema"}),
        ("ampdbg explain forward", {"forward-overflow"}),
        pytest.param("ampdbg report --format m", {"markdown"}, marks=pytest.mark.slow),
        pytest.param("ampdbg scan --fail-on w", {"warning"}, marks=pytest.mark.slow),
    ],
)
def test_shells_complete_commands_codes_and_option_values(typed: str, offered: set[str], tmp_path: Path) -> None:
    words = {"_AMPDBG_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    done = subprocess.run(
        [sys.executable, "-c", "from ampdbg.commands.app import main; main()"],
        cwd=tmp_path,
        env=environment(**words),
        capture_output=True,
        text=True,
        check=False,
    )
    assert set(done.stdout.split()) == offered, done.stderr
