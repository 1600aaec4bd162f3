"""An output layer that overflows and shares its weight with the embedding: pinned together, patched where it fails."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from ampdbg.config.file import load_config
from ampdbg.proof import proof
from ampdbg.proof.experiments import perform
from ampdbg.proof.suggestion import suggest
from ampdbg.report.suggestion import content

NET = """\
import torch
import torch.nn.functional as F
from torch import nn


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(50, 64), nn.LayerNorm(64)
        self.head = nn.Linear(64, 50, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.constant_(self.norm.weight, 8000.0)

    def forward(self, ids):
        x = self.norm(self.embedding(ids))
        return self.head(x)


def batches():
    generator = torch.Generator().manual_seed(0)
    return [(ids[:, :-1], ids[:, 1:]) for ids in torch.randint(0, 50, (8, 4, 17), generator=generator)]


def loss(output, target):
    return F.cross_entropy(1e-4 * output.float().flatten(0, 1), target.flatten())
"""

CONFIG = """\
model: {target: net.py:LM}
data: {target: net.py:batches}
loss: {target: net.py:loss}
train: {steps: 6}
"""

ADDED = """\
-        return self.head(x)
+        with torch.autocast(device_type=x.device.type, enabled=False):
+            return self.head(x)
"""


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process is started for the proof: it takes seconds to start one."""
    monkeypatch.setattr(proof, "fresh_processes", lambda folder: contextlib.nullcontext(perform))


@pytest.mark.slow
def test_tied_modules_are_one_part_of_the_set_and_the_patch_leaves_the_embedding_alone(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "config.yaml").write_text(CONFIG)
    config = load_config(tmp_path / "config.yaml")
    found = suggest(config)
    embedding, head = found.record.pins
    assert (embedding.name, embedding.tied, embedding.sites) == ("embedding", ("head",), ())
    assert (head.name, head.tied) == ("head", ("embedding",))
    text = (content(found.record) or b"").decode()
    assert text.startswith("# Keeps in FP32 under autocast: head.\n")
    assert ADDED in text
    by_name = suggest(config, form="module")
    assert by_name.record.verification is not None
    assert by_name.record.verification.passed
    assert "without embedding and head" in [step.name for step in by_name.record.verification.steps]
