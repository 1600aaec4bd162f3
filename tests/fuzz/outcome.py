"""How an attack may end: a result with its record, one message, or an interrupt. Anything else is a fault of ampdbg."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import HealthCheck, settings

import ampdbg
from ampdbg.commands import bisect, scan
from ampdbg.errors import RecordError
from ampdbg.record.file import FOLDER, LATEST, read_record
from ampdbg.record.run import Record
from tests.commands.program import Result

PACKAGE = str(Path(ampdbg.__file__).parent)

HANG = 30.0
"""The most seconds that an attack may take."""

LONGEST = 10_000
"""The most characters of a message."""


IN_SUITE = 100
"""Hypothesis' own number of examples."""

CHECKS = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]


def rounds(every: int, quick: int = IN_SUITE) -> settings:
    """One example per ``every`` of the budget: 100 in the suite (at most ``quick``), 120,000 in ``make fuzz``."""
    budget = settings().max_examples
    examples = max(1, budget // every)
    return settings(max_examples=min(examples, quick) if budget == IN_SUITE else examples, suppress_health_check=CHECKS)


@dataclass
class Attack:
    """One run of the program in ``folder``, which holds only the ``given`` files, and its ``result``."""

    folder: Path
    given: set[str] = field(default_factory=set)
    started: float = 0.0
    result: Result | None = None

    @property
    def records(self) -> dict[str, Record]:
        """The records that the run left, by name.

        Raises:
            RecordError: A record cannot be read.
        """
        paths = (path for path in sorted((self.folder / FOLDER).glob("*.json")) if ".patch" not in path.name)
        return {path.name: read_record(path) for path in paths}


@contextmanager
def attack(folder: Path) -> Iterator[Attack]:
    """Yields an attack that takes the result, then checks it and restores the folder.

    Raises:
        AssertionError: There are faults. The message lists them, and the output of the program.
    """
    under_way = Attack(folder, _names(folder), time.monotonic())
    yield under_way
    faults = list(_faults(under_way))
    assert not faults, f"{faults}\n{under_way.result}"
    for name in sorted(_names(folder) - under_way.given, reverse=True):
        path = folder / name
        path.rmdir() if path.is_dir() else path.unlink()


def _names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def _faults(ended: Attack) -> Iterator[str]:
    result = ended.result
    assert result is not None
    if (seconds := time.monotonic() - ended.started) > HANG:
        yield f"it took {seconds:.0f} s"
    if result.code not in (0, 1, 2, 130):
        yield f"the exit code {result.code}"
    yield from faults_of_text(result)
    yield from files_left(ended)
    try:
        yield from faults_of_records(result, ended.records)
    except RecordError as error:
        yield f"a record is damaged: {error}"


def faults_of_text(result: Result) -> Iterator[str]:
    if "ampdbg itself failed" in result.stderr:
        yield "a confession"
    if PACKAGE in result.stderr:
        yield "frames of ampdbg"
    errors = re.findall(r"^error: .*(?:\n(?!error: ).*)*", result.stderr, flags=re.MULTILINE)
    if result.code == 2 and (len(errors) != 1 or len(errors[0]) > LONGEST):
        yield f"{len(errors)} messages, of {sum(map(len, errors))} characters"
    # The result of suggest-fp32 is a patch, if any.
    has_result = bool(result.stdout) or "suggest-fp32" in result.stderr
    if (result.code == 2 and result.stdout) or (result.code < 2 and not has_result):
        yield f"the exit code {result.code} and {len(result.stdout)} characters of result"


def files_left(ended: Attack) -> Iterator[str]:
    allowed = re.compile(
        rf"{re.escape(FOLDER.as_posix())}(/\.gitignore|/[^/]*\.(json|patch|py|yaml))?|(.*/)?__pycache__(/.*)?"
    )
    yield from (f"{name} was left" for name in _names(ended.folder) - ended.given if not allowed.fullmatch(name))
    yield from (f"{name} is gone" for name in ended.given - _names(ended.folder))


def faults_of_records(result: Result, records: dict[str, Record]) -> Iterator[str]:
    runs = [record for name, record in records.items() if name != LATEST.name]
    if (LATEST.name in records) != bool(runs):
        yield f"of {len(runs)} records the latest is not there once more"
    for record in runs:
        codes = {"scan": scan.exit_code(record, "warning"), "bisect": bisect.exit_code(record)}
        expected = 2 if record.error else codes.get(record.command, result.code)
        if expected != result.code:
            yield f"the exit code {result.code}, and {expected} by its record"
