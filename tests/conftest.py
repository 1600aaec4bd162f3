"""What the tests share: golden files, refreshed by ``pytest --update-golden``, and the program in this process."""

import gc
import importlib
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import Phase, settings

from tests.commands.program import Here

# The first example of a test may wait for torch to load a kernel; a deadline would call that flaky.
settings.register_profile("ampdbg", deadline=None)
# What `make fuzz` asks for; each attack takes its share. One that succeeds is not made smaller: that takes hours.
settings.register_profile("fuzz", deadline=None, max_examples=120_000, phases=[Phase.explicit, Phase.generate])
settings.load_profile("ampdbg")

# A shell starts what runs in its background with Ctrl-C ignored, and nohup with SIGHUP, and a process hands that on: a
# test that interrupts the program would wait for ever.
for name, handler in (("SIGINT", signal.default_int_handler), ("SIGHUP", signal.SIG_DFL)):
    number = getattr(signal, name, None)  # Windows has no SIGHUP
    if number is not None and signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

Golden = Callable[[Path, str], None]


def pytest_collection_finish() -> None:
    """What was imported stays to the end: a look through it, for garbage or for models, takes a third of a second."""
    if "torch" in sys.modules:
        importlib.import_module("torch._dynamo")  # the first optimizer of torch's would import it
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write what is produced into the golden files")
    parser.addoption(
        "--update-records", action="store_true", help="with it: make the runs again whose pages are golden"
    )


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """``golden(path, text)`` asserts that the file holds the text."""
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
