"""Patched bytes that replace files: used by every kind of import, shown in tracebacks, and gone afterwards."""

import importlib
import importlib.util
import inspect
import linecache
import sys
import traceback
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

from ampdbg.probes.source_lines import source_of
from ampdbg.proof.jobs import overlaid

PATCH = b"VALUE = 'patch'\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on ``sys.path`` with a file, a sibling and a package; imported modules are removed at the end."""
    (tmp_path / "overlaid_one.py").write_text("import overlaid_two\nVALUE = 'disk'\n")
    (tmp_path / "overlaid_two.py").write_text("VALUE = 'disk'\n")
    (tmp_path / "overlaid_package").mkdir()
    (tmp_path / "overlaid_package" / "__init__.py").write_text("from .inner import VALUE\n")
    (tmp_path / "overlaid_package" / "inner.py").write_text("VALUE = 'disk'\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def imported_by_path(path: Path, name: str = "overlaid_by_path") -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def value_of(name: str) -> str:
    return importlib.import_module(name).VALUE


def test_a_file_is_patched_for_imports_by_path_by_name_and_by_a_sibling(folder: Path) -> None:
    path = folder / "overlaid_two.py"
    with overlaid({path: PATCH}) as taken:
        assert taken == set()
        assert imported_by_path(path).VALUE == "patch"
        assert value_of("overlaid_two") == "patch"
        assert value_of("overlaid_one") == "disk"
        assert importlib.import_module("overlaid_one").overlaid_two.VALUE == "patch"
        assert taken == {path}


@pytest.mark.parametrize(
    ("path", "name"),
    [("overlaid_package/inner.py", "overlaid_package"), ("overlaid_package/../overlaid_two.py", "overlaid_two")],
    ids=["a module in a package", "another spelling of its path"],
)
def test_a_file_is_patched_in_a_package_or_by_another_spelling_of_its_path(folder: Path, path: str, name: str) -> None:
    with overlaid({folder / path: PATCH}):
        assert value_of(name) == "patch"


@pytest.mark.parametrize(
    "source",
    [
        b"VALUE = 'patch'\r\nOTHER = 1\r\n",
        "# -*- coding: latin-1 -*-\nÄRGER, VALUE = 'ü', 'patch'\n".encode("latin-1"),
        "\ufeffVALUE = 'patch'\n".encode(),
    ],
    ids=["CRLF", "latin-1", "BOM"],
)
def test_patched_bytes_keep_their_line_endings_and_encoding(folder: Path, source: bytes) -> None:
    with overlaid({folder / "overlaid_two.py": source}):
        assert value_of("overlaid_two") == "patch"
        assert "VALUE" in linecache.getline(str(folder / "overlaid_two.py"), 2 if b"coding" in source else 1)


def test_a_patched_import_neither_reads_nor_writes_bytecode(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    cache = folder / "__pycache__"
    path = folder / "overlaid_two.py"
    with overlaid({path: PATCH}):
        assert value_of("overlaid_two") == "patch"
    assert not cache.exists()
    del sys.modules["overlaid_two"]
    assert value_of("overlaid_two") == "disk"
    (compiled,) = cache.iterdir()
    was = compiled.read_bytes()
    del sys.modules["overlaid_two"]
    with overlaid({path: PATCH}):
        assert value_of("overlaid_two") == "patch"
    assert compiled.read_bytes() == was


def test_source_lines_and_tracebacks_show_the_patch_until_the_overlay_ends(folder: Path) -> None:
    path = folder / "overlaid_two.py"
    with overlaid({path: b"\n\ndef fail():\n    raise ArithmeticError  # the patch\n"}):
        module = importlib.import_module("overlaid_two")
        assert inspect.getsource(module.fail).startswith("def fail():")
        with pytest.raises(ArithmeticError) as caught:
            module.fail()
        assert "# the patch" in "".join(traceback.format_exception(caught.value))
        assert source_of((str(path), 4, "fail")).text == "raise ArithmeticError  # the patch"
    assert source_of((str(path), 1, "")).text == "VALUE = 'disk'"
    assert source_of((str(path), 4, "")).text == ""


def test_a_syntax_error_in_the_patch_names_the_patched_file_and_shows_its_line(folder: Path) -> None:
    with overlaid({folder / "overlaid_two.py": b"\nVALUE = (\n"}), pytest.raises(SyntaxError) as caught:
        importlib.import_module("overlaid_two")
    assert (caught.value.filename, caught.value.lineno) == (str(folder / "overlaid_two.py"), 2)
    assert "    VALUE = (\n" in traceback.format_exception_only(caught.value)[1]


def test_the_import_system_is_restored_after_an_error(folder: Path) -> None:
    path = folder / "overlaid_two.py"
    finders, methods = list(sys.meta_path), (SourceFileLoader.get_code, SourceFileLoader.get_data)
    own = {name for name in ("get_code", "get_data") if name in vars(SourceFileLoader)}

    def fail() -> None:
        with overlaid({path: PATCH}):
            importlib.import_module("overlaid_two")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert sys.meta_path == finders
    assert (SourceFileLoader.get_code, SourceFileLoader.get_data) == methods
    assert {name for name in ("get_code", "get_data") if name in vars(SourceFileLoader)} == own
    assert str(path) not in linecache.cache
    del sys.modules["overlaid_two"]
    assert value_of("overlaid_two") == "disk"
