"""What the README shows is so: its Python runs as it stands, and its screen is what scan prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch.amp.grad_scaler import GradScaler

import ampdbg
from ampdbg.record.file import read_record
from tests.report.pages import rendered

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    scaler = GradScaler("cpu")
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 3)).square().mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


def without_values(text: str) -> str:
    return re.sub(r"\d{1,3}(,\d{3})+", "VALUE", text)


def test_the_finding_on_its_screen_is_what_scan_prints() -> None:
    [(config, screen)] = re.findall(r"^```console\n\$ ampdbg scan (\S+)\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    text = rendered(ampdbg.scan(ROOT / config, steps=1), folder=str(ROOT))
    start, end = "error forward-overflow", "  ampdbg explain forward-overflow\n"
    # The text that the example trains on is Python's own, and another release words it differently.
    assert without_values(text[text.index(start) : text.index(end)]) in without_values(screen)
    assert end in screen


def test_the_example_of_a_watched_loop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [example] = [text for text in EXAMPLES if "ampdbg.watch(" in text]
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = tmp_path / "record.json"
    exec(example, {"model": model, "optimizer": optimizer, "train": train, "path": path})
    assert capsys.readouterr().out.startswith("misuse-clip-scaled Source(file=")
    record = read_record(path)
    assert (record.command, record.verdict, len(record.steps)) == ("watch", "other", 3)
