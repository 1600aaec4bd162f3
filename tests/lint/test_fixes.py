"""Fixes as pairs of files: the edit reads as if written by hand, and the fixed script trains like its FP32 run.

Each script leaves its ``losses``. The reference runs under plain Python without a GPU: autocast and scaler are off
there, and a misuse has no effect. Stand-ins replace apex's classes.
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
"""Fixes that do not change how a script trains in half precision."""

NOISE = 0.01
"""The largest distance of a loss of this size in FP16 from its FP32 value."""


def fixture(name: str, end: str) -> Path:
    return HERE / "fixtures" / f"{name}.{end}.py"


@pytest.mark.parametrize("name", NAMES)
def test_a_fix_produces_the_expected_file(name: str) -> None:
    made = fixed_file(str(fixture(name, "in")), Settings(), in_half=True)
    assert made.problem == ""
    assert made.after is not None
    assert made.after.decode() == fixture(name, "out").read_text("utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_a_fixed_file_needs_no_further_fix(name: str) -> None:
    assert fixed_file(str(fixture(name, "out")), Settings(), in_half=True).after is None


@cache
def losses(end: str, *, emulated: bool) -> dict[str, list[float] | str]:
    """The losses of all fixtures, computed in one process."""
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
def test_each_fixed_script_trains_in_half_like_the_original_in_fp32() -> None:
    reference, fixed = losses("in", emulated=False), losses("out", emulated=True)
    # This fix decides whether the function is called at all, in FP32 too.
    reference["decorator"] = losses("out", emulated=False)["decorator"]
    for name in NAMES:
        assert isinstance(reference[name], list), (name, reference[name])
        assert fixed[name] == pytest.approx(reference[name], abs=NOISE), name
        assert fixed[name] != reference[name], f"{name} did not run in half"


@pytest.mark.slow
def test_unfixed_scripts_fail_or_train_differently_unless_the_fix_is_harmless() -> None:
    before, fixed = losses("in", emulated=True), losses("out", emulated=True)
    for name in NAMES:
        if name in HARMLESS:
            assert before[name] == fixed[name]
        elif name != "apex_classes":  # apex cannot be installed: its stand-ins are torch's
            assert isinstance(before[name], str) or before[name] != pytest.approx(fixed[name], abs=NOISE), name
