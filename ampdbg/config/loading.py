"""Reads a config file and the ``--set`` options into a Config, or says everything that is wrong with them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from ampdbg.config.mistakes import Mistake, Place, dotted, explain, in_one_message, shown
from ampdbg.config.schema import Config, ConfigFile
from ampdbg.config.target_names import which_instead
from ampdbg.config.yaml_lines import KeyPath, YamlDocument, YamlError, read_yaml
from ampdbg.errors import ConfigError

# Options come after every line of the file.
_AFTER_THE_FILE = 10**9


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Reads and checks a config.

    Args:
        path: the YAML file; targets and the checkpoint are relative to its folder.
        overrides: ``"dotted.key=value"``, the value being YAML; they replace what the file says.

    Raises:
        ConfigError: the message lists every mistake, each with its line or its ``--set`` option.
    """
    document = _read(path)
    data = {} if document.data is None else document.data
    places = {keys: Place(line, f"{path}:{line}") for keys, line in document.lines.items()}
    mistakes = [
        Mistake(Place(line, f"{path}:{line}"), dotted(keys), f"given twice; the first is in line {first}")
        for keys, line, first in document.duplicates
    ]
    return _checked(data, places, overrides, path.parent, str(path), mistakes)


def config_of(data: Mapping[str, Any], source: str, folder: Path, overrides: Sequence[str] = ()) -> Config:
    """Checks a config that stands in no YAML file; messages name ``source`` in the place of a line.

    Args:
        data: the keys and values of a config file; it is left as it is.
        source: what the user gave instead of a config, such as ``"--module model.py"``.
        folder: targets and the checkpoint are relative to it.
        overrides: as for :func:`load_config`.

    Raises:
        ConfigError: the message lists every mistake.
    """
    places: dict[KeyPath, Place] = {keys: Place(0, source) for keys in ((), *((key,) for key in data))}
    return _checked(copy.deepcopy(dict(data)), places, overrides, folder, source, [])


def config_of_record(resolved: Mapping[str, Any], source: str, folder: Path, overrides: Sequence[str] = ()) -> Config:
    """Checks the config of a record again; the arguments are those of :func:`config_of`.

    A key that holds its default is taken as not given: a record does not tell the two apart, and an optimizer
    that is given would come before the model's own ``configure_optimizers``.
    """
    given = {key: value for key, value in resolved.items() if value != _default(key)}
    return config_of(given, source, folder, overrides)


def _default(key: str) -> object:
    """The default of a key as plain data."""
    field = ConfigFile.model_fields.get(key)
    value = field.default if field is not None else None
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else value


def _checked(
    data: dict[Any, Any],
    places: dict[KeyPath, Place],
    overrides: Sequence[str],
    folder: Path,
    source: str,
    mistakes: list[Mistake],
) -> Config:
    """The config that ``data`` and ``overrides`` make; raises with ``mistakes`` and all that are found here."""
    for index, override in enumerate(overrides):
        place = Place(_AFTER_THE_FILE + index, f"--set {override}")
        mistakes += [Mistake(place, "", text) for text in _override(data, override, place, places)]
    try:
        parsed = ConfigFile.model_validate(data, context={"folder": folder})
    except ValidationError as error:
        mistakes += explain(error, places)
    if mistakes:
        raise ConfigError(in_one_message(mistakes, source))
    given = {name: getattr(parsed, name) for name in parsed.model_fields_set}
    return Config(**given, folder=folder, places={dotted(keys): place.text for keys, place in places.items()})


def _read(path: Path) -> YamlDocument:
    """The file as YAML: a mapping, or nothing at all."""
    try:
        raw = path.read_bytes()
    except IsADirectoryError:
        raise ConfigError(
            f"{path}: a folder; give a config file.{which_instead(path.name, _yaml_files(path))}"
        ) from None
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file.{_configs_near(path)}") from None
    except OSError as error:
        # Windows says "permission denied" for a folder.
        what = "a folder; give a config file" if path.is_dir() else f"cannot be read: {error.strerror or error}"
        raise ConfigError(f"{path}: {what}") from None
    try:
        document = read_yaml(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: not UTF-8 text; save the file as UTF-8") from None
    except YamlError as mistake:
        raise ConfigError(f"{path}:{mistake.line}: {mistake.text}") from None
    if document.data is not None and not isinstance(document.data, dict):
        keys = ", ".join(ConfigFile.model_fields)
        raise ConfigError(f"{path}:{document.lines[()]}: got {shown(document.data)}; allowed: a mapping of {keys}")
    return document


def _configs_near(path: Path) -> str:
    if not path.parent.is_dir():
        return f" There is no folder {path.parent}."
    return which_instead(path.name, _yaml_files(path.parent))


def _yaml_files(folder: Path) -> list[str]:
    return sorted(item.name for item in folder.iterdir() if item.suffix in (".yaml", ".yml") and item.is_file())


def _override(data: dict[Any, Any], override: str, place: Place, places: dict[KeyPath, Place]) -> list[str]:
    """Puts one ``--set`` into ``data`` and its place into ``places``; returns what is wrong with it."""
    key, equals, text = override.partition("=")
    path: KeyPath = tuple(key.strip().split("."))
    if not equals or not all(path):
        return ["write it as dotted.key=value, for example --set train.steps=100"]
    try:
        document = read_yaml(text)
    except YamlError as mistake:
        return [f"the value is {mistake.text}"]
    for keys in [keys for keys in places if keys[: len(path)] == path]:
        del places[keys]
    inner: Any = data
    for depth, part in enumerate(path[:-1], start=1):
        if inner.get(part) is None:
            inner[part] = {}
            places[path[:depth]] = place
        inner = inner[part]
        if not isinstance(inner, dict):
            above = dotted(path[:depth])
            return [f"{above} is {shown(inner)}, which has no keys; set {above} as a whole"]
    inner[path[-1]] = document.data
    places.update({path + keys: place for keys in document.lines})
    return [f"{dotted(path + keys)} is given twice" for keys, _, _ in document.duplicates]
