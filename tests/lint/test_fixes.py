"""Fixes as pairs of files: the edit is what a person would have written, and it trains as the script in FP32 does.

Each script leaves its ``losses``. Under plain Python, without a GPU, autocast and scaler are off, so that a misuse does
nothing: that run is the reference. apex's classes have stand-ins.
"""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from ampdbg.lint.engine import fixed_file
from ampdbg.lint.settings import Settings

HERE = Path(__file__).parent
FIXTURES = sorted((HERE / "fixtures").glob("*.in.py"))
NAMES = [path.name.removesuffix(".in.py") for path in FIXTURES]

HARMLESS = {
    "deprecated_spellings": "the same objects by their new names",
    "backward_in_autocast": "this loop comes to no harm",
}
"""The fixes that change nothing of how a script trains in half."""

NOISE = 0.01
"""How far a loss of this size in FP16 is from FP32's, at most."""


def fixture(name: str, end: str) -> Path:
    return HERE / "fixtures" / f"{name}.{end}.py"


@pytest.mark.parametrize("name", NAMES)
def test_a_fix_is_what_a_person_would_write(name: str) -> None:
    made = fixed_file(str(fixture(name, "in")), Settings(), in_half=True)
    assert made.problem == ""
    assert made.after is not None
    assert made.after.decode() == fixture(name, "out").read_text("utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_left_to_be_fixed(name: str) -> None:
    assert fixed_file(str(fixture(name, "out")), Settings(), in_half=True).after is None


@cache
def losses(end: str, *, emulated: bool) -> dict[str, list[float] | str]:
    """Of all fixtures, in one process."""
    scripts = {str(fixture(name, end)): name for name in NAMES}
    run = ["-m", "ampdbg", "run", "--emulate", "--no-watch"] if emulated else []
    path = os.pathsep.join(map(str, (HERE / "reference", HERE.parents[1])))
    done = subprocess.run(
        [sys.executable, *run, str(HERE / "losses_of.py"), *scripts],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
    )
    return {scripts[script]: found for script, found in json.loads(done.stdout).items()}


@pytest.mark.slow
def test_after_the_fix_each_script_trains_in_half_as_before_in_fp32() -> None:
    reference, fixed = losses("in", emulated=False), losses("out", emulated=True)
    # Whether its function is called at all is what this fix changes, in FP32 too.
    reference["decorator"] = losses("out", emulated=False)["decorator"]
    for name in NAMES:
        assert isinstance(reference[name], list), (name, reference[name])
        assert fixed[name] == pytest.approx(reference[name], abs=NOISE), name
        assert fixed[name] != reference[name], f"{name} did not run in half"


@pytest.mark.slow
def test_before_the_fix_none_does_but_where_it_does_no_harm() -> None:
    before, fixed = losses("in", emulated=True), losses("out", emulated=True)
    for name in NAMES:
        if name in HARMLESS:
            assert before[name] == fixed[name]
        elif name != "apex_classes":  # apex cannot be had: its stand-ins are torch's
            assert isinstance(before[name], str) or before[name] != pytest.approx(fixed[name], abs=NOISE), name
