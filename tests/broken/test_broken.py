"""Every kind of mistake gives one message that says what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ampdbg
from ampdbg.config.file import load_config
from ampdbg.errors import ConfigError, UserCodeError, WorkloadError
from ampdbg.workload.build import build_workload
from tests.broken.cases import BROKEN, BROKEN_CONFIGS, BROKEN_WORKLOADS, HEALTHY, Broken


def named(case: Broken) -> str:
    return case.name


def test_the_cases_have_different_names() -> None:
    assert len({case.name for case in BROKEN}) == len(BROKEN) >= 30


def test_the_healthy_case_they_are_made_from_is_healthy(tmp_path: Path) -> None:
    workload = build_workload(load_config(Broken("healthy", HEALTHY, ()).write(tmp_path)), torch.device("cpu"))
    batches = workload.batches()
    assert all(workload.losses(next(batches))["loss"].isfinite() for _ in range(4))


@pytest.mark.parametrize("case", BROKEN_CONFIGS, ids=named)
def test_a_broken_config_says_what_is_wrong(case: Broken, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(case.write(tmp_path))
    message = str(raised.value)
    assert [fragment for fragment in case.expected if fragment not in message] == [], message
    assert message.startswith(str(tmp_path / "config.yaml"))
    assert len(message) < 10_000


@pytest.mark.parametrize("case", BROKEN_WORKLOADS, ids=named)
def test_a_broken_workload_says_what_is_wrong(case: Broken, tmp_path: Path) -> None:
    config = load_config(case.write(tmp_path))
    with pytest.raises((WorkloadError, UserCodeError)) as raised:
        four_steps(config.folder / "config.yaml")
    message = str(raised.value)
    assert [fragment for fragment in case.expected if fragment not in message] == [], message
    assert isinstance(raised.value, UserCodeError) == case.blames_user_code
    assert str(Path(ampdbg.__file__).parent) not in getattr(raised.value, "user_traceback", "")


def four_steps(config: Path) -> None:
    workload = build_workload(load_config(config), torch.device("cpu"))
    batches = workload.batches()
    for _ in range(4):
        sum(workload.losses(next(batches)).values(), torch.zeros(())).backward()
