"""Where the narrowest patch does not hold, a wider one is tried, and its reader is told what the other failed in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ampdbg.proof import suggestion
from ampdbg.record.pins import Proof, ProofStep
from ampdbg.report.suggestion import content
from tests.proof.overflowing import NET, written

FAILED = Proof(
    False, (ProofStep("the failing step (0)", True, "healthy"), ProofStep("further batches", False, "loss NaN"))
)


def suggested_where(
    outcomes: list[Proof], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, net: str = NET
) -> tuple[suggestion.Suggestion, list[Any]]:
    """What is suggested if the proofs come out like this, one after another, and the patches that were to be proven."""
    proven: list[Any] = []

    def prove(config: object, failing: object, patched: Any, *args: Any, **kwargs: Any) -> Proof:
        proven.append(patched)
        return outcomes[len(proven) - 1]

    monkeypatch.setattr(suggestion, "prove", prove)
    return suggestion.suggest(written(tmp_path, {"net.py": net})), proven


def test_a_wider_patch_says_what_the_narrower_one_failed_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, proven = suggested_where([FAILED, Proof(True)], tmp_path, monkeypatch)
    assert (
        "#     Editing line 15 of net.py alone was not enough: further batches: loss NaN\n"
        in (content(found.record) or b"").decode()
    )
    assert proven[0] != proven[1]


@pytest.mark.slow
def test_what_the_narrowest_patch_failed_in_is_told_where_no_other_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    also = Proof(False, (ProofStep("the failing step (0)", False, "loss inf"),))
    found, proven = suggested_where([FAILED, also], tmp_path, monkeypatch)
    assert found.edits == ()
    assert found.record.verification == FAILED
    assert len(proven) == 2  # the third way makes the patch of the second, which was proven already


@pytest.mark.slow
def test_the_narrowest_patch_that_holds_has_nothing_to_excuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = suggested_where([Proof(True)], tmp_path, monkeypatch)
    assert found.record.handover is not None
    assert [(unit.title, unit.notes) for unit in found.record.handover.units] == [("line 15 of net.py", ())]


IN_TWO_FUNCTIONS = """\
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 8)

    def forward(self, x):
        return self.body(x)


def summed(x):
    return x @ torch.full((8, 8), 3e4)


def energy(x):
    return 1e-12 * (x * x).mean()


def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 16, 8, generator=generator).unbind() for _ in range(4)]


def loss(output, target):
    return energy(summed(0.01 * output)) + 1e-9 * summed(output).abs().mean()
"""


@pytest.mark.slow
def test_what_the_rest_of_a_patch_does_not_need_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first edit hands on in FP32 cures the second line too."""
    needless = ProofStep("without line 19 of net.py", False, "not needed: healthy; loss 1.0000, 1.0000 in FP32")
    found, proven = suggested_where([Proof(False, (needless,)), Proof(True)], tmp_path, monkeypatch, IN_TWO_FUNCTIONS)
    assert found.record.handover is not None
    assert [(unit.title, unit.notes) for unit in found.record.handover.units] == [("line 15 of net.py", ())]
    assert len(proven) == 2
    assert found.edits[0].after.count(b"enabled=False") == 1


@pytest.mark.slow
def test_what_was_refused_is_told_once_with_its_file_and_lines(tmp_path: Path) -> None:
    net = NET.replace("torch.eye", "F.torch.eye").replace(
        "def forward(self, x):", "def forward(self, x, torch=None, _keep_in_fp32=None):"
    )
    config = written(tmp_path, {"net.py": f"{net}\n\ndef _keep_in_fp32(x):\n    return x\n"})
    found = suggestion.suggest(config, verify=False)
    assert found.edits == ()
    path = tmp_path / "net.py"
    assert found.record.handover is not None
    assert found.record.handover.refused == (
        f"{path}:15: the name torch stands for something else here; import torch under its own name first",
        f"{path}: it has a function _keep_in_fp32 already; add the modules to it by hand, or rename it",
    )
