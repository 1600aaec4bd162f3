"""``ampdbg.watch`` with captures, and the callbacks that stand on it, in scripts of their users."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ampdbg import watch
from ampdbg.record.file import read_record
from ampdbg.record.run import Record
from tests.commands.program import Result, start
from tests.script import frameworks, scripts
from tests.script.test_frameworks import OVERFLOW, PLANTED


def emulated(folder: Path, text: str, *arguments: str) -> Result:
    """The script on an emulated GPU, and nobody that watches it from outside."""
    (folder / "train.py").write_text(text, encoding="utf-8")
    return start(folder, "run", "--emulate", "--no-watch", "train.py", *arguments)


def with_watch(text: str) -> str:
    """The script with its loop in a watch that captures."""
    text = text.replace("import sys, torch", "import sys, torch, ampdbg")
    begins = "    watch = ampdbg.watch(net, optimizer, captures='kept').start()\n    for _ in range(steps):"
    text = text.replace("    for _ in range(steps):", begins)
    ends = "    watch.stop()\n    ampdbg.write_record(ampdbg.diagnose(watch.record()), 'r.json')\n    print("
    return text.replace("    print(", ends, 1)


def replayed(folder: Path, captures: Path) -> Record:
    """The record of a replay of the first capture."""
    start(folder, "replay", str(min(captures.iterdir())), "--record=c.json")
    return read_record(folder / "c.json")


@pytest.mark.slow
@pytest.mark.parametrize("gain", ["1", "400"])
def test_a_watched_loop_captures_its_bad_steps(tmp_path: Path, gain: str) -> None:
    alone = emulated(tmp_path, scripts.PLAIN, gain, "6")
    result = emulated(tmp_path, with_watch(scripts.PLAIN), gain, "6")
    assert (result.code, result.stdout) == (0, alone.stdout)
    record = read_record(tmp_path / "r.json")
    if gain == "1":
        assert (record.verdict, record.findings, (tmp_path / "kept").exists()) == ("healthy", (), False)
        return
    found = record.findings[0]
    assert (record.verdict, found.code, found.module, found.step) == ("precision", "forward-overflow", "attention", 0)
    again = replayed(tmp_path, tmp_path / "kept").findings[0]
    assert (again.code, again.module, again.source) == (found.code, found.module, found.source)


def test_a_step_is_asked_for_in_a_watched_loop(tmp_path: Path) -> None:
    text = with_watch(scripts.PLAIN).replace("optimizer.zero_grad()", "optimizer.zero_grad(); print(ampdbg.capture())")
    result = emulated(tmp_path, text, "1", "3")
    assert result.stdout.count("True") == 3
    assert (tmp_path / "kept").exists()


CALLBACKS = {
    "lightning": ("t = L.Trainer(", "t = L.Trainer(callbacks=[__import__('ampdbg').lightning_callback()], "),
    "transformers": (
        "train_dataset=Data()",
        "train_dataset=Data(), callbacks=[__import__('ampdbg').transformers_callback()]",
    ),
}
SCRIPTS = {"lightning": frameworks.LIGHTNING, "transformers": frameworks.TRAINER}


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLBACKS)
@pytest.mark.parametrize("is_faulty", [False, True])
def test_a_callback_watches_and_captures(tmp_path: Path, name: str, is_faulty: bool) -> None:
    healthy, faulty, module = PLANTED[name]
    text = SCRIPTS[name].replace(healthy, faulty) if is_faulty else SCRIPTS[name]
    text = f"import tests.models.torchvision_on_cpu\n{OVERFLOW}{text}"
    alone = emulated(tmp_path, text)
    result = emulated(tmp_path, text.replace(*CALLBACKS[name]))
    assert (result.code, result.stdout.splitlines()[-1]) == (0, alone.stdout.splitlines()[-1])
    record = read_record(tmp_path / ".ampdbg" / "latest.json")
    if not is_faulty:
        assert (record.verdict, record.findings) == ("healthy", ())
        return
    found = record.findings[0]
    assert (record.verdict, found.code, found.module) == ("precision", "forward-overflow", module)
    assert "forward-overflow" in result.stderr
    again = replayed(tmp_path, tmp_path / ".ampdbg" / "captures").findings[0]
    assert (again.code, again.module, again.source) == (found.code, found.module, found.source)


@pytest.mark.parametrize("captures", [3, True, b"folder", ["folder"]])
def test_captures_that_are_no_path_are_refused(captures: Any) -> None:
    model = torch.nn.Linear(2, 1)
    with pytest.raises(TypeError, match="in the place of captures, the path of a folder; allowed: watch"):
        watch(model, torch.optim.SGD(model.parameters()), captures=captures)
