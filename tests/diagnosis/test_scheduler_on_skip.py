"""A scheduler that moves in skipped steps: information if a few skips settle the scale, a warning if skips continue."""

import pytest

from ampdbg.diagnosis.diagnose import diagnose
from ampdbg.record.codes import CODES
from ampdbg.record.findings import Finding, Source
from ampdbg.record.run import Misuse, Record
from tests.diagnosis.test_diagnose import record_of, steps_of

CODE = "misuse-scheduler-on-skip"


def with_scheduler(pattern: str, *, interval: int = 10_000, file: str = "train.py", raised: str = "") -> Record:
    """A run whose scheduler moves in every step, including skipped ones."""
    steps = steps_of(pattern, interval)
    first = next(step.step for step in steps if step.skipped)
    source = Source(file, 3, "train", "scheduler.step()")
    misuse = Misuse(CODE, first, sum(step.skipped for step in steps), source, raised)
    return diagnose(record_of(steps, misuses=(misuse,)))


def told(record: Record) -> Finding:
    return next(finding for finding in record.findings if finding.code == CODE)


@pytest.mark.parametrize(
    ("pattern", "interval"),
    [
        ("..x" + "." * 9, 10_000),
        ("xxxx" + "." * 8, 10_000),
        ("x", 10_000),
        (("." * 8 + "x") * 3 + "." * 5, 8),  # each skip right after growth
    ],
)
def test_a_scheduler_on_skip_is_information_while_skips_settle_the_scale(pattern: str, interval: int) -> None:
    record = with_scheduler(pattern, interval=interval)
    assert told(record).severity == "info"
    assert record.verdict == ("inconclusive" if pattern == "x" else "healthy")
    assert record.findings[0].code == "scale-calibration"


@pytest.mark.parametrize(
    "pattern",
    [
        "xxxxx" + "." * 8,
        "x." * 6,
        "." * 22 + "x" + "." * 3 + "x" + "." * 3,  # neither at the start nor after growth
    ],
)
def test_a_scheduler_on_skip_is_a_warning_if_skips_are_many_or_continue(pattern: str) -> None:
    record = with_scheduler(pattern)
    assert (record.findings[0], record.verdict) == (told(record), "other")
    assert told(record).severity == "warning"


def test_a_misuse_that_torch_raises_on_is_an_error_after_a_single_skip() -> None:
    assert told(with_scheduler("..x" + "." * 9, raised="no")).severity == "error"


def test_other_misuses_remain_warnings_in_a_run_with_one_skip() -> None:
    (found,) = diagnose(record_of(steps_of("..x" + "." * 9), misuses=(Misuse("misuse-many-updates", 2),))).findings
    assert (found.code, found.severity) == ("misuse-many-updates", "warning")


@pytest.mark.parametrize("folder", ["/env/lib/python3.12/site-packages", "/usr/lib/python3/dist-packages"])
def test_a_scheduler_stepped_by_a_library_has_its_own_remedy(folder: str) -> None:
    remedy = told(with_scheduler("x." * 6, file=f"{folder}/lightning/pytorch/core/module.py")).remedy
    assert remedy == CODES[CODE].remedy_in_library
    assert remedy.startswith("a library steps this scheduler")
    assert told(with_scheduler("x." * 6)).remedy == CODES[CODE].remedy


@pytest.mark.parametrize(
    ("file", "severity", "verdict"),
    [
        ("/env/lib/python3.12/site-packages/lightning/pytorch/core/module.py", "info", "healthy"),
        ("/home/user/train.py", "warning", "other"),
    ],
)
def test_a_library_calling_backward_in_autocast_is_information(file: str, severity: str, verdict: str) -> None:
    misuse = Misuse("misuse-backward-in-autocast", 0, 12, Source(file, 3, "backward", "loss.backward()"))
    record = diagnose(record_of(steps_of("." * 12), misuses=(misuse,)))
    assert ([found.severity for found in record.findings], record.verdict) == ([severity], verdict)
