"""What is wrong in a config, said to the person who wrote it: place, key, what was given, what is allowed."""

from __future__ import annotations

import json
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from ampdbg.config.schema import ConfigFile, TargetSpec
from ampdbg.config.target_names import did_you_mean
from ampdbg.config.yaml_lines import KeyPath


class Place(NamedTuple):
    """Where a key was given: ``"config.yaml:3"`` or ``"--set train.steps=9"``; mistakes are sorted by ``order``."""

    order: int
    text: str


Places = Mapping[KeyPath, Place]

# Other names of the formats, too far from the config's for difflib.
_SAID_AS = {"fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp32": "float32", "float": "float32"}

# What pydantic adds to a location: which kind of a union was tried, and that a key is meant, not its value.
_MARKERS = ("<mapping>", "<number>", "[key]")


@dataclass(frozen=True)
class Mistake:
    """One mistake; ``key`` is dotted, and empty where the mistake lies in no key."""

    place: Place
    key: str
    text: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.place.text, self.key, self.text) if part)


def in_one_message(mistakes: Iterable[Mistake], source: str) -> str:
    """The message of a ConfigError: the mistake itself, or a list of them in the file's order."""
    ordered = sorted(mistakes, key=lambda mistake: mistake.place.order)
    if len(ordered) == 1:
        return str(ordered[0])
    return "\n  ".join([f"{source}: {len(ordered)} mistakes", *map(str, ordered)])


def explain(error: ValidationError, places: Places) -> list[Mistake]:
    """pydantic's errors as mistakes."""
    return [_explain_one(typing.cast(Mapping[str, Any], item), places) for item in error.errors(include_url=False)]


def place_of(path: KeyPath, places: Places) -> Place:
    """Where ``path`` was given, or the nearest key above it that was."""
    while path not in places:
        as_written = (*path[:-1], str(path[-1]))  # a key that YAML reads as a number
        if as_written in places:
            return places[as_written]
        path = path[:-1]
    return places[path]


def dotted(path: KeyPath) -> str:
    """``("precision", "pins", 0)`` is ``precision.pins[0]``."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")


@dataclass(frozen=True)
class _Spot:
    """A key path in the schema: its ``field``, and the ``owner`` section that has or would have it."""

    path: KeyPath
    owner: type[BaseModel]
    field: FieldInfo | None
    item: Mapping[str, Any]

    @property
    def allowed(self) -> str:
        if self.field is None:
            return ""
        section = _section(self.field.annotation)
        return self.field.description or (f"a mapping with the keys {_keys(section)}" if section else "")


def _explain_one(item: Mapping[str, Any], places: Places) -> Mistake:
    spot = _find(item)
    text = _EXPLAIN.get(item["type"], _wrong_value)(spot)
    return Mistake(place_of(spot.path, places), dotted(spot.path), text)


def _find(item: Mapping[str, Any]) -> _Spot:
    """Walks the schema along the error's location, leaving out pydantic's own markers such as ``<number>``."""
    path = tuple(part for part in item["loc"] if part not in _MARKERS)
    owner: type[BaseModel] = ConfigFile
    field: FieldInfo | None = None
    for depth, part in enumerate(path):
        field = owner.model_fields.get(part) if isinstance(part, str) else field
        section = _section(field.annotation) if field else None
        if section is None or depth == len(path) - 1:
            break
        owner = section
    return _Spot(path, owner, field, item)


def _section(annotation: Any) -> type[BaseModel] | None:
    """The section class in an annotation such as ``TargetSpec | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in typing.get_args(annotation) if (found := _section(part))), None)


def _keys(section: type[BaseModel]) -> str:
    return ", ".join(section.model_fields)


def _missing(spot: _Spot) -> str:
    return f"missing; needed: {spot.allowed}"


def _unknown_key(spot: _Spot) -> str:
    key = str(spot.path[-1])
    elsewhere = next((name for name in _dotted_fields(ConfigFile) if name.endswith(f".{key}")), "")
    hint = f" Did you mean {elsewhere!r}?" if elsewhere else did_you_mean(key, spot.owner.model_fields)
    if not hint and issubclass(spot.owner, TargetSpec):
        hint = f" Arguments of the target go under args: {dotted(spot.path[:-1])}.args.{key}"
    return f"unknown key; allowed: {_keys(spot.owner)}.{hint}"


def _dotted_fields(section: type[BaseModel], prefix: str = "") -> Iterable[str]:
    for name, field in section.model_fields.items():
        yield prefix + name
        inner = _section(field.annotation)
        if inner is not None and not issubclass(inner, TargetSpec):
            yield from _dotted_fields(inner, f"{prefix}{name}.")


def _not_a_section(spot: _Spot) -> str:
    section = _section(spot.field.annotation) if spot.field else ConfigFile
    given, keys = spot.item["input"], _keys(section or ConfigFile)
    written = ""
    if section and issubclass(section, TargetSpec) and isinstance(given, str):
        written = f", written as {dotted(spot.path)}: {{target: {given}}}"
    return f"got {shown(given)}; allowed: a mapping with the keys {keys}{written}"


def _own_words(spot: _Spot) -> str:
    return str(spot.item["ctx"]["error"])


def _bad_key(spot: _Spot) -> str:
    # YAML 1.1 reads on, off, yes and no as booleans, and dates and numbers as such.
    return f"got {shown(spot.path[-1])} as a key; allowed: names that are strings (quote it if it is one)"


def _wrong_value(spot: _Spot) -> str:
    if spot.item["loc"][-1] == "[key]":
        return _bad_key(spot)
    given = spot.item["input"]
    hint = ""
    if isinstance(given, str) and spot.item["type"] == "literal_error" and spot.field:
        hint = did_you_mean(_SAID_AS.get(given, given), map(str, typing.get_args(spot.field.annotation)))
    return f"got {shown(given)}; allowed: {spot.allowed}{'.' if hint else ''}{hint}"


_EXPLAIN: Mapping[str, Callable[[_Spot], str]] = {
    "missing": _missing,
    "extra_forbidden": _unknown_key,
    "model_type": _not_a_section,
    "model_attributes_type": _not_a_section,
    "value_error": _own_words,
    "invalid_key": _bad_key,
}


def shown(value: object, most: int = 60) -> str:
    """A value as the config would write it, cut to ``most`` characters."""
    if value is None:
        return "nothing"
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = str(value)
    return text if len(text) <= most else text[: most - 3] + "..."
