"""Shared by all tests: golden files, refreshed by ``pytest --update-golden``, and the program in this process."""

import functools
import gc
import importlib
import itertools
import signal
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import Phase, settings

from tests.commands.program import Here

# The first example of a test may wait while torch loads a kernel; with a deadline it would count as flaky.
settings.register_profile("ampdbg", deadline=None)
# For `make fuzz`: each attack takes its share. A failing example is not shrunk: that takes hours.
settings.register_profile("fuzz", deadline=None, max_examples=120_000, phases=[Phase.explicit, Phase.generate])
settings.load_profile("ampdbg")

# A shell starts background jobs with Ctrl-C ignored, and nohup ignores SIGHUP. Child processes inherit this: a test
# that interrupts the program would wait forever.
for name, handler in (("SIGINT", signal.default_int_handler), ("SIGHUP", signal.SIG_DFL)):
    number = getattr(signal, name, None)  # Windows has no SIGHUP
    if number is not None and signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

Golden = Callable[[Path, str], None]


def pytest_collection_finish() -> None:
    """Freezes imported modules: a search through them, for garbage or for models, takes a third of a second."""
    if "torch" in sys.modules:
        importlib.import_module("torch._dynamo")  # else the first optimizer of torch would import it
    apart.update({name: sys.modules.pop(name) for name in [*sys.modules] if name.startswith("tests.")})
    gc.collect()
    gc.freeze()


apart: dict[str, ModuleType] = {}
"""The modules of tests, kept out of ``sys.modules``: a replay restores the globals of every file of the user."""


ended = itertools.count(1)
"""Counts tests; objects that exist after every 20th test are frozen."""


@functools.cache
def used_by(module: ModuleType) -> dict[str, ModuleType]:
    """The test modules that ``module`` uses objects of, with ``module`` itself."""
    found, new = {module.__name__: module}, [module]
    while new:
        for value in [*vars(new.pop()).values()]:
            name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
            for one in apart.keys() & {name, type(value).__module__} - found.keys():
                found[one] = apart[one]
                new.append(apart[one])
    return found


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Puts only the test modules that the test uses into ``sys.modules``."""
    assert isinstance(item, pytest.Function)
    used = used_by(item.module)
    sys.modules.update(used)
    try:
        return (yield)
    finally:
        for name in used:
            sys.modules.pop(name, None)
        if next(ended) % 20 == 0:
            gc.collect()
            gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write what is produced into the golden files")
    parser.addoption(
        "--update-records", action="store_true", help="with it: make the runs again whose pages are golden"
    )


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """``golden(path, text)`` asserts that the file contains the text."""
    update = bool(request.config.getoption("--update-golden"))

    def check(path: Path, text: str) -> None:
        if update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text.encode())
        assert path.exists(), f"{path} does not exist; write it with: pytest --update-golden"
        assert text == path.read_bytes().decode(), f"not as in {path}; if that is right: pytest --update-golden"

    return check


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Here:
    """Calls the program in an empty folder: ``here("scan", "c.yaml")``."""
    monkeypatch.chdir(tmp_path)
    return Here(tmp_path, monkeypatch, capfd)
