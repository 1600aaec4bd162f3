"""An optimizer's own step behind ``unscale_`` is unguarded only where it is plain to see that nothing withholds it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ampdbg.probes.step_guards import is_unguarded
from ampdbg.source.ownership import Line

PLAIN = """
def train(model, loader, optimizer, scaler, clip):
    for x in loader:
        scaler.scale(model(x)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        scaler.update()
"""
UNSCALED, CLIPPED, STEPPED = (line + "\n" for line in PLAIN.splitlines()[4:7])


def lines_in(folder: Path, code: str) -> tuple[Line, Line]:
    """The lines of the unscaling and of the step."""
    file = folder / "train.py"
    file.write_text(code, encoding="utf-8")
    numbers = [
        number
        for word in (".unscale_", "optimizer.step")
        for number, text in enumerate(code.splitlines(), 1)
        if word in text
    ]
    return (str(file), numbers[0], "train"), (str(file), numbers[-1], "train")


@pytest.mark.parametrize(
    "code",
    [
        PLAIN,
        PLAIN.replace(UNSCALED + CLIPPED, f"        if clip:\n    {UNSCALED}    {CLIPPED}"),
        PLAIN.replace(
            CLIPPED, "        norm = clip_grad_norm_(model.parameters(), clip)\n        print(norm.item())\n"
        ),
        PLAIN.replace(UNSCALED + CLIPPED + STEPPED, "        scaler.unscale_(optimizer); optimizer.step()\n"),
        f"{PLAIN}        if not torch.isnan(model.weight).any():\n            log(model)\n",
    ],
)
def test_a_step_that_always_follows_is_unguarded(tmp_path: Path, code: str) -> None:
    assert is_unguarded(*lines_in(tmp_path, code))


NORM = "        norm = clip_grad_norm_(model.parameters(), clip)\n"


@pytest.mark.parametrize(
    "code",
    [
        PLAIN.replace(STEPPED, f"        if norm < 1e4:\n    {STEPPED}"),
        PLAIN.replace(CLIPPED, f"{NORM}        if norm > 1e4:\n            continue\n"),
        PLAIN.replace(CLIPPED, f"{NORM}        assert norm < 1e4\n"),
        PLAIN.replace(CLIPPED, f"{CLIPPED}        check(model)\n"),
        PLAIN.replace(CLIPPED, f"{NORM}        for one in model.parameters():\n            one.grad = None\n"),
        PLAIN.replace("model.parameters(), clip", "model.parameters(), clip, error_if_nonfinite=True"),
        f"def look(x):\n    return torch.isfinite(x)\n\n{PLAIN}",
        f"{PLAIN}\n\ndef mend(x):\n    x.register_hook(zero)\n",
        PLAIN.replace(UNSCALED, f"        if is_bad(model):\n            continue\n{UNSCALED}"),
        PLAIN.replace(".backward()", ".back()"),
        PLAIN.replace(STEPPED, "        optimizer.step(closure)\n"),
        PLAIN.replace(STEPPED, "").replace(UNSCALED, STEPPED + UNSCALED),
        PLAIN.replace("for x in", "for x on"),
    ],
)
def test_what_may_withhold_it_is_no_misuse(tmp_path: Path, code: str) -> None:
    assert not is_unguarded(*lines_in(tmp_path, code))


def test_what_is_not_plain_to_see_is_no_misuse(tmp_path: Path) -> None:
    unscaled, stepped = lines_in(tmp_path, PLAIN)
    library = str(Path(pytest.__file__))
    assert not is_unguarded(None, stepped)
    assert not is_unguarded(unscaled, None)
    assert not is_unguarded(unscaled, (*stepped[:2], "other"))
    assert not is_unguarded((library, 1, "step"), (library, 2, "step"))
