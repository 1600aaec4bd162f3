"""Output formats: the modules of one folder, by their names."""

from __future__ import annotations

import pkgutil
import sys
from pathlib import Path

import pytest

from ampdbg.record.file import to_json
from ampdbg.report import formats
from ampdbg.report.view import Look, Typed
from tests.report.pages import rendered
from tests.report.records import healthy

LOOK = Look(80, color=False, unicode=True)
TYPED = Typed("config.yaml", ".ampdbg/r.json", "/home/me", verbose=True)


def test_text_is_the_page_and_json_the_record() -> None:
    assert formats.FORMATS == ("html", "json", "markdown", "sarif", "text")
    assert formats.written(healthy(), TYPED, LOOK, "text") == rendered(healthy())
    assert formats.written(healthy(), TYPED, LOOK, "json") == to_json(healthy())


def test_a_file_in_the_folder_is_a_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "verdict.py").write_text("def write(record, typed, look):\n    return record.verdict\n")
    monkeypatch.setattr(formats, "__path__", [*formats.__path__, str(tmp_path)])
    monkeypatch.setitem(sys.modules, "ampdbg.report.formats.verdict", None)  # taken out again at the end
    del sys.modules["ampdbg.report.formats.verdict"]
    assert formats.written(healthy(), TYPED, LOOK, "verdict") == "healthy"
    assert "verdict" in [module.name for module in pkgutil.iter_modules(formats.__path__)]
