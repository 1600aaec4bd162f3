"""Loading of a config file and the ``--set`` options into a Config, with a report of all mistakes."""

from __future__ import annotations

import copy
import os
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from ampdbg.config.schema import Config, ConfigFile, TargetSpec
from ampdbg.config.targets import did_you_mean, why_no_file
from ampdbg.config.yaml_document import KeyPath, YamlDocument, YamlError, read_yaml
from ampdbg.errors import ConfigError, reason_of
from ampdbg.files import read_file
from ampdbg.quantities import cut, dotted, shown

LARGEST_FILE = 2**20
"""In bytes."""

MOST_MISTAKES = 20
"""Up to this many mistakes are explained; the others are only counted."""

LONGEST = 200
"""The maximum number of characters of a key or a suggested input in a message."""

LONGEST_TEXT, LONGEST_MESSAGE = 1000, 8000
"""The maximum numbers of characters for one mistake and for all mistakes."""

# Options are sorted after every line of the file.
_AFTER_THE_FILE = 10**9


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Load and check a config.

    Args:
        path: the YAML file; targets and the checkpoint are relative to its folder.
        overrides: ``"dotted.key=value"`` with a YAML value; they replace the file's values.

    Raises:
        ConfigError: lists every mistake with its line or its ``--set`` option.
    """
    document = _read(path)
    data = {} if document.data is None else document.data
    places = _places(document, lambda line: Place(line, f"{path}:{line}"))
    mistakes = [
        Mistake(Place(line, f"{path}:{line}"), dotted(keys), f"given twice; the first is in line {first}")
        for keys, line, first in document.duplicates
    ]
    return _checked(data, places, overrides, path.parent, str(path), mistakes)


def config_of(data: Mapping[str, Any], source: str, folder: Path, overrides: Sequence[str] = ()) -> Config:
    """Check a config that is not in a YAML file. Messages name ``source`` instead of a line.

    Args:
        data: the keys and values of a config file; not modified.
        source: the user's alternative to a config, such as ``"--module model.py"``.
        folder: the folder that targets and the checkpoint are relative to.
        overrides: as for :func:`load_config`.

    Raises:
        ConfigError: lists every mistake.
    """
    places: dict[KeyPath, Place] = {keys: Place(0, source) for keys in ((), *((key,) for key in data))}
    return _checked(copy.deepcopy(dict(data)), places, overrides, folder, source, [])


def config_of_record(resolved: Mapping[str, Any], source: str, folder: Path, overrides: Sequence[str] = ()) -> Config:
    """Check the config of a record; the arguments are those of :func:`config_of`.

    A key with its default value counts as not given, since a record does not distinguish the two. Otherwise its
    optimizer would take precedence over the model's own ``configure_optimizers``.
    """
    defaults = ConfigFile.model_construct().model_dump(mode="json")
    given = {key: value for key, value in resolved.items() if value != defaults.get(key)}
    return config_of(given, source, folder, overrides)


def _checked(
    data: dict[Any, Any],
    places: dict[KeyPath, Place],
    overrides: Sequence[str],
    folder: Path,
    source: str,
    mistakes: list[Mistake],
) -> Config:
    """Return the config from ``data`` and ``overrides``, or raise with ``mistakes`` and all further mistakes."""
    for index, override in enumerate(overrides):
        place = Place(_AFTER_THE_FILE + index, f"--set {cut(override, LONGEST)}")
        mistakes += [Mistake(place, "", text) for text in _override(data, override, place, places)]
    folder = Path(os.path.abspath(folder))
    try:
        parsed = ConfigFile.model_validate(data, context={"folder": folder})
    except ValidationError as error:
        mistakes += explain(error, places)
    if mistakes:
        raise ConfigError(in_one_message(mistakes, source))
    given = {name: getattr(parsed, name) for name in parsed.model_fields_set}
    where = {dotted(keys): place.text for keys, place in places.items()}
    return Config(**given, folder=folder, start=Path.cwd(), places=where)


def _read(path: Path) -> YamlDocument:
    """Return the file as YAML: a mapping, or an empty document."""
    problem = why_no_file(Path(os.path.abspath(path)), str(path), "*.y*ml")
    if problem:
        raise ConfigError(f"{path}: {problem}")
    try:
        raw = read_file(path, LARGEST_FILE)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {reason_of(error)}") from None
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


def _override(data: dict[Any, Any], override: str, place: Place, places: dict[KeyPath, Place]) -> list[str]:
    """Apply one ``--set`` to ``data`` and record its place in ``places``; return its mistakes."""
    key, equals, text = override.partition("=")
    path: KeyPath = tuple(key.strip().split("."))
    if not equals or not all(path):
        return ["write it as dotted.key=value, for example --set train.steps=100"]
    if not key.isprintable():
        return [f"got {shown(key)} as a key; allowed: the names of the config's keys, and of arguments"]
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
    places.update({path + keys: found for keys, found in _places(document, lambda line: place).items()})
    return [f"{dotted(path + keys)} is given twice" for keys, _, _ in document.duplicates]


class Place(NamedTuple):
    """The origin of a key: ``"config.yaml:3"`` or ``"--set train.steps=9"``. Mistakes are sorted by ``order``.

    ``written`` is the key's spelling if YAML does not read it as text, else "".
    """

    order: int
    text: str
    written: str = ""


def _places(document: YamlDocument, place: Callable[[int], Place]) -> dict[KeyPath, Place]:
    """Return the places of a document's keys, with ``place`` applied to their lines."""
    found = {path: place(line) for path, line in document.lines.items()}
    for path, key in document.written.items():
        found.setdefault(path, found[(*path[:-1], key)]._replace(written=key or "null"))
    return found


# Format names that difflib does not match to the config's names.
_SAID_AS = {"fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp32": "float32", "float": "float32"}

# Parts that pydantic adds to a location: the tried kind of a union, or a marker for keys.
_MARKERS = ("<mapping>", "<number>", "<path>", "[key]")


@dataclass(frozen=True)
class Mistake:
    """A mistake; ``key`` is dotted, or empty if the mistake is not in a key."""

    place: Place
    key: str
    text: str

    def __str__(self) -> str:
        said = self.place.text, cut(self.key, LONGEST), cut(self.text, LONGEST_TEXT)
        return ": ".join(filter(None, said))


def in_one_message(mistakes: Iterable[Mistake], source: str) -> str:
    """Return the message of a ConfigError: the only mistake, or a list in the order of the file."""
    ordered = sorted(mistakes, key=lambda mistake: mistake.place.order)
    if len(ordered) == 1:
        return str(ordered[0])
    said = list(map(str, ordered[:MOST_MISTAKES]))
    while sum(map(len, said)) > LONGEST_MESSAGE:
        said.pop()
    more = [f"and {len(ordered) - len(said):,} more"] if len(ordered) > len(said) else []
    return "\n  ".join([f"{source}: {len(ordered):,} mistakes", *said, *more])


def explain(error: ValidationError, places: Mapping[KeyPath, Place]) -> list[Mistake]:
    """Convert pydantic's errors to mistakes."""
    items: list[Any] = error.errors(include_url=False)
    paths = [tuple(part for part in item["loc"] if part not in _MARKERS) for item in items]
    ordered = sorted(zip(paths, items, strict=True), key=lambda pair: place_of(pair[0], places).order)
    return [
        # Only explained mistakes search similar names, which is slow.
        Mistake(
            place,
            dotted((*path[:-1], place.written) if place.written else path),
            _explanation(path, item, place) if index < MOST_MISTAKES else "",
        )
        for index, (path, item) in enumerate(ordered)
        for place in (place_of(path, places),)
    ]


def place_of(path: KeyPath, places: Mapping[KeyPath, Place]) -> Place:
    """Return the place of ``path``, or of its nearest parent with a place."""
    while path not in places:
        as_written = (*path[:-1], str(path[-1]))  # a key that YAML reads as a number
        if as_written in places:
            return places[as_written]
        path = path[:-1]
    return places[path]


def _explanation(path: KeyPath, item: Mapping[str, Any], place: Place) -> str:
    owner, field = _in_schema(path)
    kind, given = item["type"], shown(item["input"])
    section = _section(field.annotation) if field else None
    mapping = f"a mapping with the keys {', '.join(section.model_fields)}" if section else ""
    allowed = (field.description if field else "") or mapping
    if kind == "missing":
        return f"missing; needed: {allowed}"
    if kind == "extra_forbidden":
        return _unknown_key(path, owner)
    if kind == "value_error":
        return str(item["ctx"]["error"])
    if kind == "invalid_key" or item["loc"][-1] == "[key]":
        # YAML 1.1 reads on, off, yes and no as booleans, and also dates and numbers.
        return (
            f"got {place.written or shown(path[-1])} as a key; allowed: names that are strings (quote it if it is one)"
        )
    if kind in ("model_type", "model_attributes_type"):
        is_target = section and issubclass(section, TargetSpec) and isinstance(item["input"], str)
        target = f", written as {dotted(path)}: {{target: {item['input']}}}" if is_target else ""
        written = target if len(target) <= LONGEST else ""
        return f"got {given}; allowed: {mapping}{written}"
    hint = ""
    if kind == "literal_error" and field and isinstance(item["input"], str):
        hint = did_you_mean(_SAID_AS.get(item["input"], item["input"]), typing.get_args(field.annotation))
    return f"got {given}; allowed: {allowed}{'.' if hint else ''}{hint}"


def _in_schema(path: KeyPath) -> tuple[type[BaseModel], FieldInfo | None]:
    """Return the section of a key and the key's field, or the field of the enclosing sequence or mapping."""
    owner: type[BaseModel] = ConfigFile
    field: FieldInfo | None = None
    for depth, part in enumerate(path):
        field = owner.model_fields.get(part) if isinstance(part, str) else field
        section = _section(field.annotation) if field else None
        if section is None or depth == len(path) - 1:
            break
        owner = section
    return owner, field


def _section(annotation: Any) -> type[BaseModel] | None:
    """Return the section class in an annotation such as ``TargetSpec | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in typing.get_args(annotation) if (found := _section(part))), None)


def _unknown_key(path: KeyPath, owner: type[BaseModel]) -> str:
    key = str(path[-1])
    elsewhere = next((name for name in _dotted_fields(ConfigFile) if name.endswith(f".{key}")), "")
    hint = f" Did you mean {elsewhere!r}?" if elsewhere else did_you_mean(key, owner.model_fields)
    if not hint and issubclass(owner, TargetSpec):
        hint = " Arguments of the target go under args: " + cut(f"{dotted(path[:-1])}.args.{key}", LONGEST)
    return f"unknown key; allowed: {', '.join(owner.model_fields)}.{hint}"


def _dotted_fields(section: type[BaseModel], prefix: str = "") -> Iterable[str]:
    for name, field in section.model_fields.items():
        yield prefix + name
        inner = _section(field.annotation)
        if inner is not None and not issubclass(inner, TargetSpec):
            yield from _dotted_fields(inner, f"{prefix}{name}.")
