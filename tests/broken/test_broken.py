"""Every kind of mistake through the real program: one message on stderr, exit code 2, no traceback of ours."""

import re
from pathlib import Path

import pytest
import torch

import ampdbg
from ampdbg.config.file import load_config
from ampdbg.record.file import read_record
from ampdbg.workload.build import build_workload
from tests.broken.cases import BROKEN, BROKEN_CONFIGS, HEALTHY, Broken
from tests.commands.program import Here, Result, start_fresh

PACKAGE = str(Path(ampdbg.__file__).parent)
"""Not the bare name: a clone, and the environment inside it, lie in a folder called ampdbg."""


def check(case: Broken, result: Result) -> None:
    """What the user must see: the message once, whole, and nothing of ampdbg's insides."""
    error = result.stderr
    assert (result.code, result.stdout) == (2, ""), error
    assert len(re.findall(r"^error: ", error, flags=re.MULTILINE)) == 1, error
    assert "ampdbg itself failed" not in error
    assert [part for part in case.expected if part not in error] == [], error
    assert PACKAGE not in error, error
    assert ('File "' in error) == case.blames_user_code, error
    if case in BROKEN_CONFIGS:
        assert error.startswith("error: config.yaml")
        assert len(error) < 10_000


def test_the_cases_have_different_names() -> None:
    assert len({case.name for case in BROKEN}) == len(BROKEN) >= 30


def test_the_healthy_case_they_are_made_from_is_healthy(tmp_path: Path) -> None:
    workload = build_workload(load_config(Broken("healthy", HEALTHY, ()).write(tmp_path)), torch.device("cpu"))
    batches = workload.batches()
    assert all(workload.losses(next(batches))["loss"].isfinite() for _ in range(4))


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: case.name)
def test_a_mistake_gives_one_message_and_exit_code_2(case: Broken, here: Here) -> None:
    case.write(here.folder)
    check(case, here("scan", "config.yaml", "--quiet"))
    # Only a mistake that shows in mid-run leaves a record: of the steps before it.
    assert all(record.steps and record.error for record in map(read_record, here.folder.glob(".ampdbg/*.json")))


@pytest.mark.parametrize("name", ["only comments", "unclosed bracket"])
def test_the_same_in_a_process_of_its_own(name: str, tmp_path: Path) -> None:
    case = next(case for case in BROKEN if case.name == name)
    case.write(tmp_path)
    check(case, start_fresh(tmp_path, "scan", "config.yaml"))
