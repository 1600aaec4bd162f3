"""A hook of MkDocs: the pages that say what the code says, one for each command and each code, and the config."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from typer.testing import CliRunner

from ampdbg.commands.app import COMMANDS, program
from ampdbg.config.schema import json_schema
from ampdbg.record.codes import CODES
from ampdbg.report.explanation import SECTIONS, Explanation, explanations

EXIT_CODES = """
| exit code | meaning |
| --- | --- |
| 0 | nothing is wrong |
| 1 | something was found |
| 2 | it could not run: the message says what was given, what is allowed and what to type |
| 130 | interrupted; what was seen so far is in the record |
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages, and leads to them."""
    made = pages()
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    for entry in config.nav or ():
        if isinstance(entry, dict):
            for title, place in entry.items():
                if isinstance(place, str) and place.endswith("/"):
                    entry[title] = [path for path in made if path.startswith(place)]
    return files


def pages() -> dict[str, str]:
    """Every page by its path below docs/."""
    return {**command_pages(), "config.md": config_page(), **code_pages()}


# Commands


def command_pages() -> dict[str, str]:
    """A page a command, and their list."""
    rows = [f"| [`ampdbg {name}`]({name}.md) | {_escaped(_said(command)[0])} |" for name, command in COMMANDS.items()]
    table = "\n".join(["| command | what it does |", "| --- | --- |", *rows])
    listing = f"# Commands\n\n{table}\n\nResults go to stdout, progress and messages to stderr.\n{EXIT_CODES}"
    return {
        "commands/index.md": listing,
        **{f"commands/{name}.md": _command_page(name, command) for name, command in COMMANDS.items()},
    }


def _said(command: Callable[..., int]) -> list[str]:
    """The paragraphs of a command's help."""
    return [" ".join(part.split()) for part in (inspect.getdoc(command) or "").split("\n\n")]


def _command_page(name: str, command: Callable[..., int]) -> str:
    """What it does, and its help as the program prints it."""
    printed = CliRunner().invoke(program(), [name, "--help"], env={"COLUMNS": "100", "TERMINAL_WIDTH": "100"}).stdout
    said = "\n\n".join(map(_escaped, _said(command)))
    return f"# ampdbg {name}\n\n{said}\n\n```text\n{printed.strip()}\n```\n"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").strip()


# The config


def config_page() -> str:
    """Every key with what is allowed and its default, from the JSON schema."""
    schema = json_schema()
    rows = "\n".join(_keys(schema, schema["$defs"]))
    return (
        "# Config\n\nA YAML file; `ampdbg init` writes one to start from. Mistakes are reported all together, each "
        "with its line. `ampdbg schema` prints the schema that this page is made from, for editors:\n\n"
        "```yaml\n# yaml-language-server: $schema=ampdbg.schema.json\n```\n\n"
        f"| key | meaning | allowed | default |\n| --- | --- | --- | --- |\n{rows}\n\n"
        "Any of them can be given for one run: `--set train.steps=200`. Targets are `FILE.py:NAME`, relative to the "
        "file, or `package.module:NAME`.\n"
    )


def _keys(section: Mapping[str, Any], known: Mapping[str, Any], above: str = "") -> Iterator[str]:
    for key, value in section.get("properties", {}).items():
        inner = _section_of(value, known)
        needed = key in section.get("required", ())
        default = "needed" if needed else f"`{json.dumps(value.get('default'))}`" if not _is_long(value) else ""
        allowed = value.get("description") or (", ".join(inner["properties"]) if inner else _forms(value))
        yield f"| `{above}{key}` | {_escaped(value.get('title', ''))} | {_escaped(allowed)} | {default} |"
        if inner is not None:
            yield from _keys(inner, known, f"{above}{key}.")


def _section_of(value: Mapping[str, Any], known: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The keys below a key; of one that also takes something else, those of its mapping."""
    forms = [value, *value.get("anyOf", ()), *value.get("oneOf", ())]
    for form in [*forms, *(inner for one in forms for inner in (*one.get("anyOf", ()), *one.get("oneOf", ())))]:
        if "$ref" in form:
            section: Mapping[str, Any] = known[form["$ref"].rpartition("/")[2]]
            return section
    return None


def _is_long(value: Mapping[str, Any]) -> bool:
    return isinstance(value.get("default"), dict) and bool(value["default"])


def _forms(value: Mapping[str, Any]) -> str:
    """What the alternatives of a key allow."""
    forms = value.get("anyOf", ())
    return ", or ".join(str(form.get("description") or form.get("type")) for form in forms)


# Codes


def code_pages() -> dict[str, str]:
    """A page a code, as `ampdbg explain` says it, and their list by family."""
    entries = explanations()
    families = (
        f"## {family}\n\n| code | |\n| --- | --- |\n"
        + "\n".join(f"| [`{entry.code}`]({entry.code}.md) | {entry.title} |" for entry in members)
        for family, members in groupby(entries, key=lambda entry: entry.family)
    )
    listing = "# Codes\n\nWhat ampdbg can find. `ampdbg explain CODE` says the same in a terminal.\n\n"
    return {
        "codes/index.md": listing + "\n\n".join(families) + "\n",
        **{f"codes/{entry.code}.md": _code_page(entry) for entry in entries},
    }


def _code_page(entry: Explanation) -> str:
    code = CODES[entry.code]
    facts = f"`{entry.code}` · {entry.family} · {code.severity} · verdict {code.verdict}"
    body = "\n\n".join(f"## {title}\n\n{_linked(getattr(entry, field), entry)}" for field, title in SECTIONS.items())
    return f"# {entry.title}\n\n{facts}\n\n{body}\n"


def _linked(markdown: str, entry: Explanation) -> str:
    """Other codes lead to their pages, but for those in examples of code."""
    parts = re.split(r"(^```.*?^```)", markdown, flags=re.MULTILINE | re.DOTALL)

    def link(found: re.Match[str]) -> str:
        code = found[1]
        return f"[`{code}`]({code}.md)" if code in CODES and code != entry.code else found[0]

    return "".join(part if part.startswith("```") else re.sub(r"`([a-z0-9-]+)`", link, part) for part in parts)
