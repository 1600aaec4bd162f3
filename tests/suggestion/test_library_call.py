"""A loss of an installed package that overflows: the user's own call of it is wrapped."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ampdbg.config.file import load_config
from ampdbg.proof.suggestion import Suggestion, suggest

LIBRARY = """\
def energy_loss(output, target):
    energy = (output * output).sum(-1)
    return 1e-6 * (energy - target).abs().mean()
"""

NET = """\
import torch
from torch import nn

from energies import energy_loss


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 8)

    def forward(self, x):
        return self.body(x)


def batches():
    generator = torch.Generator().manual_seed(1)
    return [(600 * torch.randn(4, 8, generator=generator), torch.zeros(4)) for _ in range(4)]


def loss(output, target):
    return energy_loss(output, target)
"""

CONFIG = """\
model: {target: net.py:Net}
data: {target: net.py:batches}
loss: {target: net.py:loss}
train: {steps: 3}
"""


def found_with(library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Suggestion:
    """What is suggested where the installed package is this."""
    site = tmp_path / "site-packages"
    site.mkdir()
    (site / "energies.py").write_text(library)
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "config.yaml").write_text(CONFIG)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delitem(sys.modules, "energies", raising=False)
    return suggest(load_config(tmp_path / "config.yaml"), verify=False)


def test_the_users_call_of_a_librarys_function_is_wrapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = found_with(LIBRARY, tmp_path, monkeypatch)
    assert found.record.handover is not None
    assert [unit.title for unit in found.record.handover.units] == ["energy_loss() on line 22 of net.py"]
    (edit,) = found.edits
    assert edit.after.decode().endswith(
        "    with torch.autocast(device_type=output.device.type, enabled=False):\n"
        "        return energy_loss(output.float(), target)\n"
    )


def test_a_library_that_casts_by_itself_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = found_with(LIBRARY.replace("output * output", "output.float() ** 2"), tmp_path, monkeypatch)
    assert (found.record.verdict, found.record.pins, found.edits) == ("healthy", (), ())
