"""A step that is another when it is run again is compared with nothing, and that is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from ampdbg.diagnosis.diagnose import diagnose
from ampdbg.training.loop import train
from tests.written import written

WORKLOAD = """
import itertools
import torch
from torch import nn

CALLS = itertools.count()  # nobody can wind it back

class Net(nn.Module):
    def __init__(self, draws):
        super().__init__()
        self.draws = draws
        self.head = nn.Linear(4, 1)
    def forward(self, x):
        return self.head(x * (1.0 + self.draws * (next(CALLS) % 7) / 10))

def data():
    return [(torch.ones(8, 4), torch.zeros(8, 1))] * 2
"""


@pytest.mark.parametrize("draws", [0.0, 1.0])
def test_what_draws_where_no_replay_can_follow_is_not_compared(tmp_path: Path, draws: float) -> None:
    config = written(
        tmp_path,
        WORKLOAD,
        model=("Net", {"draws": draws}),
        data="data",
        loss="torch.nn.functional:mse_loss",
        optimizer={"args": {"lr": 1e-9}},
        train={"steps": 3, "device": "cpu"},
    )
    record = diagnose(train(config))
    notes = [note for note in record.unseen.notes if note.endswith("it was not compared with FP32")]
    assert [finding.code for finding in record.findings if finding.severity != "info"] == []
    assert len(notes) == int(draws)
    assert all(note.startswith("the loss of step 2 is ") for note in notes)
