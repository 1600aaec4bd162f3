"""Lint findings that a run prints on stderr: no duplicates, and no effect on the run."""

from pathlib import Path

import pytest

from ampdbg.commands.source_findings import say_source_findings
from ampdbg.lint import engine
from tests.commands.program import start
from tests.report.records import healthy

SCRIPT = """\
import torch

model = torch.nn.Linear(4, 1).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
scaler = torch.amp.GradScaler("cuda")
for _ in range(3):
    optimizer.zero_grad()
    with torch.autocast("cuda"):
        loss = model(torch.randn(2, 4).cuda()).square().mean()
    scaler.scale(loss).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "checkpoint.pt")
"""
SAID = """\
ampdbg lint also found in the source:
  train.py:14: misuse-unsaved-scaler: the checkpoint lacks the scaler's state: a resumed run starts again at \
the initial scale
  ampdbg lint train.py
"""


def test_a_run_prints_only_the_lint_findings_missing_from_its_own_report(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = start(tmp_path, "run", "--emulate", "train.py")
    assert done.code == 1
    assert done.stdout == ""
    assert done.stderr.endswith(SAID)
    assert "error misuse-clip-scaled" in done.stderr.removesuffix(SAID)


def test_a_deprecated_spelling_or_a_missing_file_prints_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "old.py").write_text("from torch.cuda.amp import autocast\n\nwith autocast():\n    pass\n")
    say_source_findings(healthy(), [tmp_path / "old.py", tmp_path / "gone.py"])
    assert capsys.readouterr().err == ""


def test_a_lint_rule_that_raises_does_not_affect_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.setattr(engine, "hits_of", lambda *given: 1 / 0)
    say_source_findings(healthy(), [tmp_path / "train.py"])
    assert capsys.readouterr().err == ""
