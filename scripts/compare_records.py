"""Whether a change of ampdbg changes what it finds: the records of every zoo case and example, before and after.

    python scripts/compare_records.py make FOLDER        # in the checkout of each version, from its root
    python scripts/compare_records.py diff BEFORE AFTER  # exit code 1 where they differ

``make`` scans, bisects and suggests a patch for each case (``--proofs`` proves the patches of the examples too), with
the version of ampdbg and of the zoo in the current folder. What is compared is what users act on: findings without
their wording, pins, trials, the search's outcome, the proof's steps, and the patch byte for byte.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

EXAMPLES = ("camera", "house_prices", "linear_attention", "vit")
FINDING = ("code", "severity", "step", "phase", "module", "op", "parameter", "root")


def main() -> int:
    """Makes or compares; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    make = verbs.add_parser("make")
    make.add_argument("folder", type=Path)
    make.add_argument("--proofs", action="store_true", help="also prove the patches of the examples")
    diff = verbs.add_parser("diff")
    diff.add_argument("before", type=Path)
    diff.add_argument("after", type=Path)
    given = parser.parse_args()
    if given.verb == "make":
        make_all(given.folder, given.proofs)
        return 0
    return compare(given.before, given.after)


def make_all(folder: Path, proofs: bool) -> None:
    """Writes one JSON file for each case and command."""
    sys.path.insert(0, str(Path.cwd()))
    import ampdbg

    folder.mkdir(parents=True, exist_ok=True)
    for name, config, overrides in runs():
        for command in ("scan", "bisect"):
            file = folder / f"{name}-{command}.json"
            if not file.exists():
                run: Callable[..., Any] = getattr(ampdbg, command)
                write(file, facts_of(attempted(run, config, overrides)))
        found = json.loads((folder / f"{name}-bisect.json").read_text())
        file = folder / f"{name}-suggest.json"
        if found.get("pins") and not file.exists():
            write(file, suggested(config, prove=proofs and name in EXAMPLES))


def runs() -> Iterator[tuple[str, Path, tuple[str, ...]]]:
    """The name, config and overrides of each run: every zoo case, its twin, every example and its twin."""
    from tests.zoo.test_zoo import CASES, FILES, config_of

    for example in EXAMPLES:
        yield example, Path(f"configs/{example}.yaml"), ()
        yield f"{example}_healthy", Path(f"configs/{example}_healthy.yaml"), ()
    for file in FILES:
        config = config_of(file, Path(tempfile.mkdtemp()))
        yield f"zoo_{file.stem}", config, ()
        if CASES[file.stem].twin:
            yield f"zoo_{file.stem}_twin", config, CASES[file.stem].twin


def attempted(run: Callable[..., Any], config: Path, overrides: tuple[str, ...]) -> Any:
    """The record, or the error that there is instead."""
    try:
        return run(config, overrides=overrides)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is compared
        return error


def facts_of(record: Any) -> dict[str, Any]:
    """What is compared of a record: no words, no times, no folders."""
    if isinstance(record, Exception):
        return {"error": type(record).__name__}
    return {
        "verdict": record.verdict,
        "findings": [finding_facts(finding) for finding in record.findings],
        "messages": [finding.message for finding in record.findings],
        "pins": [{"name": pin.name, "source": place(pin.source), "tied": list(pin.tied)} for pin in record.pins],
        "trials": [[list(trial.pins), trial.healthy] for trial in record.trials],
        "search": record.search and [record.search.outcome, record.search.minimal, record.search.step],
        "steps": [[step.step, str(step.loss), step.scale, step.skipped] for step in record.steps],
        "proof": record.verification
        and [record.verification.passed, [[step.name, step.passed] for step in record.verification.steps]],
    }


def finding_facts(finding: Any) -> dict[str, Any]:
    """A finding without its message and remedy."""
    return {**{name: getattr(finding, name) for name in FINDING}, "source": place(finding.source)}


def place(source: Any) -> str:
    """The file's name and the line."""
    return f"{Path(source.file).name}:{source.line}" if source else ""


def suggested(config: Path, prove: bool) -> dict[str, Any]:
    """The exit code and the patch that the command prints, and with ``prove`` the proof in its record."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record.json"
        words = [sys.executable, "-m", "ampdbg", "suggest-fp32", str(config), "--quiet", "--record", str(record)]
        ended = subprocess.run(words + ([] if prove else ["--no-verify"]), capture_output=True, text=True, check=False)
        verification = json.loads(record.read_text())["verification"] if record.exists() else None
    proof = verification and [verification["passed"], [[s["name"], s["passed"]] for s in verification["steps"]]]
    patch = [line for line in ended.stdout.splitlines() if not line.startswith(("---", "+++", "diff ", "index "))]
    return {"exit_code": ended.returncode, "patch": patch, "proof": proof}


def write(file: Path, facts: dict[str, Any]) -> None:
    """Writes one file, and says so."""
    file.write_text(json.dumps(facts, indent=1, default=dataclasses.asdict))
    print(file.name, flush=True)


def compare(before: Path, after: Path) -> int:
    """Prints what differs in the files that both have; 1 where anything but words does."""
    differing = worded = 0
    names = sorted({file.name for file in before.glob("*.json")} & {file.name for file in after.glob("*.json")})
    for name in names:
        one, other = (json.loads((folder / name).read_text()) for folder in (before, after))
        worded += one.pop("messages", None) != other.pop("messages", None)
        for key in one:
            if one[key] != other.get(key):
                differing += 1
                print(f"{name}: {key}\n  - {json.dumps(one[key])[:2000]}\n  + {json.dumps(other.get(key))[:2000]}")
    print(f"{len(names)} files compared: {differing} differences, {worded} with other words")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
