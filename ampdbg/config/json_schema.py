"""The config as a JSON schema (draft 2020-12): whatever it allows is checked by the config's own rules all the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ampdbg.config.schema import ConfigFile

DIALECT = "https://json-schema.org/draft/2020-12/schema"

LIMITS = {"ge": "minimum", "le": "maximum", "gt": "exclusiveMinimum", "lt": "exclusiveMaximum"}
"""How JSON schema spells a limit that pydantic leaves as it is where a check of ours comes before it."""


def json_schema() -> dict[str, Any]:
    """The keys, their types, limits and defaults; each ``description`` says what is allowed."""
    schema: dict[str, Any] = _spelled(ConfigFile.model_json_schema())
    about = "The config of ampdbg, the precision debugger for PyTorch mixed-precision training."
    return {"$schema": DIALECT, **schema, "title": "ampdbg", "description": about}


def _spelled(value: Any, *, is_names: bool = False) -> Any:
    """Without the titles that only repeat a key, and with limits as the standard spells them."""
    if isinstance(value, Mapping):
        return {
            key if is_names else LIMITS.get(key, key): _spelled(
                item, is_names=not is_names and key in ("properties", "$defs")
            )
            for key, item in value.items()
            if is_names or key != "title" or not item[:1].isupper()
        }
    return [_spelled(item) for item in value] if isinstance(value, list) else value
