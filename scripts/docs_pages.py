"""What the documentation takes from the code.

As a hook of MkDocs it adds a page for each command and each code. As a program it writes the tables that stand in
pages of docs/ between two comments, where GitHub shows them too: `make docs` runs it first.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import ampdbg
from ampdbg import errors
from ampdbg.commands.app import COMMANDS, function_of, program
from ampdbg.config.schema import json_schema
from ampdbg.diagnosis.diagnose import ORDER_OF_DECISION
from ampdbg.lint.settings import CODES as LINT_CODES
from ampdbg.record.codes import CODES
from ampdbg.report.explanation import SECTIONS, Explanation, explanations

DOCS = Path(__file__).resolve().parent.parent / "docs"
MADE = re.compile(r"(<!-- made from the code: (.*?) -->\n).*?(<!-- until here -->)", re.DOTALL)
"""A table or a file in a page: its first line, its name in TABLES or below docs/, and its last line."""


def main() -> None:
    """Writes the tables of all pages anew."""
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        if text != (now := with_tables(text)):
            page.write_text(now, encoding="utf-8")
            print(f"{page.relative_to(DOCS.parent)}: written")


def with_tables(page: str) -> str:
    """The text of a page, its tables made from the code, and its screens from their files, as they are now."""
    return MADE.sub(lambda found: f"{found[1]}\n{_made(found[2])}\n\n{found[3]}", page)


def _made(name: str) -> str:
    if name in TABLES:
        return TABLES[name]()
    kind = "yaml" if name.endswith(".yml") else "console"
    return f"```{kind}\n{(DOCS / name).read_text(encoding='utf-8').rstrip()}\n```"


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
    return {**command_pages(), **code_pages()}


# Commands


def command_pages() -> dict[str, str]:
    """A page a command, and their list."""
    rows = [f"| [`ampdbg {name}`]({name}.md) | {_escaped(summary)} |" for name, summary in COMMANDS.items()]
    table = _table("| command | what it does |", rows)
    said = "Results go to stdout, progress and messages to stderr."
    listing = f"# Commands\n\n{table}\n\n{said}\n\n{exit_code_table()}\n"
    return {
        "commands/index.md": listing,
        **{f"commands/{name}.md": _command_page(name) for name in COMMANDS},
    }


def printed_help(name: str) -> str:
    """What ``ampdbg NAME --help`` prints, 100 columns wide."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        program()([name, "--help"], prog_name="ampdbg", standalone_mode=False, terminal_width=100)
    return printed.getvalue()


def _command_page(name: str) -> str:
    """What it does, and its help as the program prints it."""
    paragraphs = (inspect.getdoc(function_of(name)) or "").split("\n\n")
    said = "\n\n".join(_escaped(" ".join(part.split())) for part in paragraphs)
    return f"# ampdbg {name}\n\n{said}\n\n```text\n{printed_help(name).strip()}\n```\n"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").strip()


# The config


def key_table() -> str:
    """Every key with what is allowed and its default, from the JSON schema."""
    schema = json_schema()
    return _table("| key | meaning | allowed | default |", _keys(schema, schema["$defs"]))


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


# Exit codes, functions, what lint finds

EXIT_CODES = {
    errors.EXIT_HEALTHY: "nothing is wrong",
    errors.EXIT_FOUND: "something was found",
    errors.EXIT_COULD_NOT_RUN: "it could not run: the message says what was given, what is allowed and what to type",
    errors.EXIT_INTERRUPTED: "interrupted; the record has what was seen so far",
}


def exit_code_table() -> str:
    """What each exit code means."""
    return _table("| exit code | meaning |", [f"| {code} | {meaning} |" for code, meaning in EXIT_CODES.items()])


def function_table() -> str:
    """Every public function of the package, and the first line of what it says of itself."""
    rows = []
    for name, home in ampdbg._HOMES.items():
        function = getattr(importlib.import_module(home, "ampdbg"), name)
        first = (inspect.getdoc(function) or "").partition("\n\n")[0]
        # A package of that name takes its place in `ampdbg` as soon as it is imported.
        named = f"ampdbg{home}.{name}" if importlib.util.find_spec(f"ampdbg.{name}") else f"ampdbg.{name}"
        rows.append(f"| `{named}` | {_escaped(re.sub(':func:|`(?=`)', '', ' '.join(first.split())))} |")
    return _table("| function | what it does |", rows)


def lint_table() -> str:
    """Every code that `ampdbg lint` finds."""
    titles = {entry.code: entry.title for entry in explanations()}
    return _table("| code | what it is |", [f"| `{code}` | {titles[code]} |" for code in LINT_CODES])


def causes_table() -> str:
    """The table of causes, as the diagnosis goes through it."""
    rows = [
        f"| {family.title} | `{one.code}` | {one.when} |" for family in ORDER_OF_DECISION for one in family.decisions
    ]
    return _table("| of | code | when |", rows)


def _table(head: str, rows: Iterable[str]) -> str:
    return "\n".join([head, re.sub(r"[^|]+", " --- ", head), *rows])


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


TABLES: Mapping[str, Callable[[], str]] = {
    "causes": causes_table,
    "config keys": key_table,
    "exit codes": exit_code_table,
    "functions": function_table,
    "lint codes": lint_table,
}
"""By the name in the comment above each."""

if __name__ == "__main__":
    main()
