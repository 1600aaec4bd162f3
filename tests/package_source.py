"""The package's source for the tests of style: each module is parsed once."""

import ast
import functools
from pathlib import Path

import ampdbg

PACKAGE = Path(ampdbg.__file__).parent


@functools.cache
def trees() -> dict[str, ast.Module]:
    """The modules by their path in the package."""
    found = {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text("utf-8")) for path in PACKAGE.rglob("*.py")}
    assert len(found) > 100, "the package was not found"
    return found
