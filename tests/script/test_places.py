"""The source line of a fault: the line of the call, and in a library also the line of the user's call."""

from pathlib import Path

import pytest

from tests.script import scripts
from tests.script.test_run import first_finding, run_with_page

DROPS = scripts.loop("""
class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.drop, self.gain = nn.Linear(16, 16), nn.Dropout(0.9), 1.0

    def forward(self, x):
        h = self.linear(x) * self.gain
        return self.drop(h)

net = nn.Sequential(nn.Linear(16, 16), Body(), nn.Linear(16, 1)).cuda()
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
scaler = torch.amp.GradScaler("cuda", init_scale=16.0)
for step in range(8):
    net[1].gain = 2e4 if step == 6 else 1.0
    x = torch.randn(32, 16, device="cuda")
    with torch.autocast("cuda"):
        loss = net(x).float().square().mean() * 1e-3
    STEP
""")
"""Dropout multiplies the values that it keeps, about 10,000, by ten."""

LIBRARY = """
from torch import nn

class Scores(nn.Module):
    def forward(self, x):
        scores = x @ x.mT
        return scores.mean(-1, keepdim=True) * 1e-4 + x

class Whole(nn.Sequential):
    def forward(self, x):
        h = self[1].linear(x) * self[1].gain
        return self[2](h)

def run(net, x):
    return net(x)
"""


def test_an_overflow_of_dropout_is_named_at_the_line_that_calls_dropout(tmp_path: Path) -> None:
    record, _, _ = run_with_page(tmp_path, DROPS)
    assert first_finding(record) == ("forward-overflow", 6, "1.drop", "return self.drop(h)")


CALLS = {
    "of its module": (("nn.Dropout(0.9)", "Scores()"), "scores = x @ x.mT", "return self.drop(h)"),
    "of its loop": (
        ("net = nn.Sequential", "net = Whole", "net(x)", "run(net, x)"),
        "h = self[1].linear(x) * self[1].gain",
        "loss = run(net, x).float().square().mean() * 1e-3",
    ),
}


@pytest.mark.parametrize("how", CALLS)
def test_an_overflow_in_a_library_also_names_the_users_call(how: str, tmp_path: Path) -> None:
    edits, own, call = CALLS[how]
    package = tmp_path / "site-packages" / "parts.py"
    package.parent.mkdir()
    package.write_text(LIBRARY, encoding="utf-8")
    script = DROPS.replace("class Body", 'sys.path.append("site-packages")\nfrom parts import *\n\nclass Body')
    for old, new in zip(edits[::2], edits[1::2], strict=True):
        script = script.replace(old, new)
    record, page, _ = run_with_page(tmp_path, script.replace("2e4", "2e5" if "loop" in how else "400.0"))
    assert first_finding(record)[::3] == ("forward-overflow", own)
    source = record.findings[0].source
    assert source is not None
    assert source.called_from is not None
    assert source.called_from.text == call
    assert f"{own} called from train.py:{source.called_from.line}" in page
    assert source.called_from.file in [listing.file for listing in record.listings]
