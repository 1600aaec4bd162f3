"""The settings of the linter: ``[tool.ampdbg.lint]`` of pyproject.toml, and the torch that a project requires."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ampdbg.errors import ConfigError, reason_of
from ampdbg.files import read_file
from ampdbg.lint.rules import RULES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MOST_BYTES = 1_000_000
REQUIREMENTS = ("pyproject.toml", "setup.cfg", "setup.py", "requirements.txt", "environment.yml", "environment.yaml")
KEYS = ("select", "ignore", "exclude")
PARTS = ("misuse", "deprecated", "apex")
"""Prefixes that select every code that begins with them."""

CODES = tuple(sorted({code for rule in RULES for code in rule.codes}))

_TORCH = re.compile(r"""(?<![\w.-])torch\s*(?:\[[^\]]*\])?\s*(==|>=|~=|>|===)\s*["']?v?(\d+)\.(\d+)""")


@dataclass(frozen=True)
class Settings:
    """``select`` and ``ignore`` are codes or their prefixes, ``exclude`` patterns of paths and names.

    ``torch`` is the oldest torch version that the project allows, if it names one.
    """

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    torch: tuple[int, int] | None = None

    def wants(self, code: str) -> bool:
        is_selected = not self.select or any(map(code.startswith, self.select))
        return is_selected and not any(map(code.startswith, self.ignore))


def read_settings(paths: Sequence[str], select: Sequence[str] = (), ignore: Sequence[str] = ()) -> Settings:
    """Return the settings of the project that the first path is in; ``select`` and ``ignore`` as typed replace its own.

    Raises:
        ConfigError: a code is unknown, or the table has an unknown key or a wrong value.
    """
    for option, codes in (("--select", select), ("--ignore", ignore)):
        _check_codes(option, codes)
    start = Path(os.path.abspath(paths[0]))
    file = next((one / "pyproject.toml" for one in (start, *start.parents) if (one / "pyproject.toml").is_file()), None)
    table = _table(file) if file is not None else Settings()
    typed = {"select": tuple(select) or table.select, "ignore": tuple(ignore) or table.ignore}
    return replace(table, torch=_oldest_torch(start), **typed)


def _table(file: Path) -> Settings:
    try:
        data = tomllib.loads(read_file(file, MOST_BYTES).decode("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read: {reason_of(error)}") from None
    for name in ("tool", "ampdbg", "lint"):
        inner = data.get(name)
        data = inner if isinstance(inner, dict) else {}
    for key, value in data.items():
        name = f"{file}: [tool.ampdbg.lint] {key}"
        if key not in KEYS:
            raise ConfigError(f"{name}: no such key; allowed: {', '.join(KEYS)}")
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise ConfigError(f"{name}: got {value!r}; needed: a list of strings")
        _check_codes(name, value if key != "exclude" else ())
    return Settings(**{key: tuple(value) for key, value in data.items()})


def _check_codes(where: str, codes: Sequence[str]) -> None:
    for code in codes:
        if not code or not any(known.startswith(code) for known in CODES):
            raise ConfigError(f"{where}: {code!r} is no code of a rule; allowed: {', '.join((*PARTS, *CODES))}")


def _oldest_torch(start: Path) -> tuple[int, int] | None:
    """Return the oldest torch version that pyproject.toml, a requirements file, setup.cfg or setup.py allows."""
    for folder in (start, *start.parents):
        files = (folder / name for name in REQUIREMENTS if (folder / name).is_file())
        if bounds := [bound for file in files for bound in _bounds(file)]:
            return min(bounds)
        if (folder / ".git").exists() or (folder / "pyproject.toml").is_file():
            return None
    return None


def _bounds(file: Path) -> list[tuple[int, int]]:
    try:
        text = read_file(file, MOST_BYTES).decode("utf-8", "replace")
    except OSError:
        return []
    return [(int(major), int(minor)) for _, major, minor in _TORCH.findall(re.sub(r"#.*", "", text))]
