"""The trial journal: what was tried is not tried again, least of all what killed the process."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ampdbg.record.findings import Source
from ampdbg.record.pins import PinSite
from ampdbg.search.atoms import atom_tree
from ampdbg.search.delta import delta_debug
from ampdbg.search.guided import guided
from ampdbg.search.journal import KILLED, Journal
from ampdbg.search.trial import OutOfTrials, Seen, Trials
from tests.search.planted import SMALL, Step

TREE = atom_tree(SMALL)
ROOT = Path(__file__).parents[2]

each_example_has_its_own_file = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new" / "trials.jsonl"


def search(path: Path, step: Step, key: str = "key") -> Trials:
    """A blind search with a journal."""
    trials = Trials(step, TREE, journal=Journal(path, key))
    delta_debug(trials)
    return trials


def step() -> Step:
    return Step(TREE, [["blocks.0.attn", "head"]])


def test_a_second_search_is_answered_from_the_file(path: Path) -> None:
    first = search(path, step())
    untried = step()
    second = search(path, untried)
    assert (second.made, second.best) == (first.made, first.best)
    assert (untried.ran, second.count) == ([], 0)


def test_each_answer_of_the_file_is_told_in_its_turn(path: Path) -> None:
    first = search(path, step())
    told: list[tuple[tuple[str, ...], Seen]] = []
    journal = Journal(path, "key")
    trials = Trials(step(), TREE, journal=journal, on_recall=lambda pins, seen: told.append((pins, seen)))
    delta_debug(trials)
    trials.test(["embed", "blocks.1"], "not in the file")
    assert told == [(trial.pins, journal.answers[trial.pins]) for trial in first.made]
    assert trials.recalled == len(first.made)


def test_of_a_discarded_file_nothing_is_left(path: Path) -> None:
    search(path, step())
    assert Journal(path, "key").discard()
    assert not path.exists()
    assert Journal(path, "key").answers == {}
    assert not Journal(unwritable(path.parents[1], "a folder in its place"), "key").discard()


def test_answers_of_the_file_are_within_any_limit(path: Path) -> None:
    search(path, step())
    trials = Trials(step(), TREE, journal=Journal(path, "key"), max_trials=0)
    assert delta_debug(trials).minimal
    with pytest.raises(OutOfTrials):
        trials.test(["embed", "blocks.1"], "not in the file")
    assert ("embed", "blocks.1") not in Journal(path, "key").answers


def test_another_key_begins_afresh(path: Path) -> None:
    search(path, step(), key="one")
    again = step()
    search(path, again, key="two")
    assert len(again.ran) > 0
    assert Journal(path, "one").answers == {}


def test_everything_that_was_seen_comes_back(path: Path) -> None:
    source = Source("näh.py", 3, "forward", "x @ y")
    sites = tuple(PinSite("forward", "a", "aten.mm.default", line, math.inf, call=2) for line in (source, None))
    seen = Seen(
        healthy=False,
        why="näh \ud800\n",
        suspects=("a:own", ""),
        runs=3,
        healthy_runs=2,
        loss=math.inf,
        seconds=0.25,
        sites=sites,
        scales=(65536.0, 0.1),
    )
    Journal(path, "ключ\n").keep(("a", ""), lambda pins: seen)
    assert Journal(path, "ключ\n").answers == {("a", ""): seen}


def test_a_trial_is_on_disk_before_it_begins(path: Path) -> None:
    def look(pins: tuple[str, ...]) -> Seen:
        assert json.loads(path.read_text().splitlines()[-1]) == {"begin": ["head"]}
        return Seen(healthy=True)

    Journal(path, "key").keep(("head",), look)
    assert len(path.read_text().splitlines()) == 3


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, SystemExit])
def test_a_trial_that_raises_is_run_the_next_time(path: Path, error: type[BaseException]) -> None:
    def raising(pins: tuple[str, ...]) -> Seen:
        raise error

    with pytest.raises(error):
        Journal(path, "key").keep(("head",), raising)
    journal = Journal(path, "key")
    assert journal.answers == {}
    journal.keep(("head",), lambda pins: Seen(healthy=True))
    assert Journal(path, "key").answers == {("head",): Seen(healthy=True)}


KILLERS = {
    "os._exit": "os._exit(3)",
    "a crash": "os.abort()",
}
if hasattr(signal, "SIGKILL"):  # Windows has none
    KILLERS["SIGKILL"] = "os.kill(os.getpid(), signal.SIGKILL)"
PROGRAM = """
import os, signal, sys
from pathlib import Path
from tests.search.test_journal import TREE, Step, guided, Journal, Trials

step = Step(TREE, [["blocks.0.attn", "head"]])

def deadly(pins):
    if pins == ("blocks.0.attn", "head"):
        KILL
    return step(pins)

guided(Trials(deadly, TREE, journal=Journal(Path(sys.argv[1]), "key")), ["blocks.0.attn", "head", "embed"])
"""


@pytest.mark.parametrize("killer", KILLERS)
def test_a_trial_that_kills_the_process_is_not_run_again(path: Path, killer: str) -> None:
    program = PROGRAM.replace("KILL", KILLERS[killer])
    died = subprocess.run(
        [sys.executable, "-c", program, str(path)], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False
    )
    assert died.returncode != 0
    again = step()
    trials = Trials(again, TREE, journal=Journal(path, "key"))
    found = guided(trials, ["blocks.0.attn", "head", "embed"])
    assert [(trial.pins, trial.healthy, trial.why) for trial in trials.made[:2]] == [
        (("embed", "blocks.0.attn", "head"), True, ""),
        (("blocks.0.attn", "head"), False, "killed the process"),
    ]
    assert again.ran == [("embed", "blocks.0.attn"), ("embed", "head")]
    # Had it lived, that trial would have been healthy; as it was, its pins are no set to train with.
    assert found.pins == ("embed", "blocks.0.attn", "head")
    assert (trials.made[1].runs, trials.made[1].healthy_runs) == (1, 0)


@given(st.data())
@each_example_has_its_own_file
def test_a_file_cut_off_anywhere_still_answers_its_whole_lines(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "trials.jsonl"
    path.unlink(missing_ok=True)
    search(path, step())
    answers, content = Journal(path, "key").answers, path.read_bytes()
    cut = data.draw(st.integers(0, len(content)))
    path.write_bytes(content[:cut])
    left = Journal(path, "key").answers
    assert Journal(path, "key").answers == left, "opened twice"
    killed = {pins for pins, seen in left.items() if seen == KILLED}
    whole = content[:cut].count(b"\n")
    assert len(left) == max(0, whole // 2 if content[:cut].endswith(b"\n") else (whole - 1) // 2)
    assert len(killed) == (content[:cut].endswith(b"\n") and whole % 2 == 0 and whole > 0)
    assert {pins: answers[pins] for pins in left if pins not in killed} == {
        pins: seen for pins, seen in left.items() if pins not in killed
    }
    search(path, step())
    assert Journal(path, "key").answers.keys() >= left.keys()


LINES = {
    "no JSON": b"{",
    "no object": b"[1]",
    "no text": b"\xff\xfe",
    "another event": b'{"middle": ["a"]}',
    "no pins": b'{"begin": 3}',
    "pins within pins": b'{"begin": [["a"]]}',
    "an end without what was seen": b'{"end": ["a"]}',
    "an unknown field": b'{"end": ["a"], "seen": {"healthy": true, "suspects": [], "color": 1}}',
}


@pytest.mark.parametrize("line", LINES.values(), ids=LINES.keys())
def test_what_stands_behind_a_damaged_line_is_not_read_and_goes(path: Path, line: bytes) -> None:
    Journal(path, "key").keep(("head",), lambda pins: Seen(healthy=True))
    sound = path.read_bytes()
    path.write_bytes(sound + line + b'\n{"begin": ["embed"]}\n')
    journal = Journal(path, "key")
    assert journal.answers == {("head",): Seen(healthy=True)}
    assert path.read_bytes() == sound


@given(st.binary())
@each_example_has_its_own_file
def test_any_file_at_all_is_begun_afresh(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "trials.jsonl"
    path.write_bytes(content)
    journal = Journal(path, "key")
    assert (journal.answers, journal.problem) == ({}, "")
    journal.keep((), lambda pins: Seen(healthy=True))
    assert Journal(path, "key").answers == {(): Seen(healthy=True)}


def unwritable(tmp_path: Path, kind: str) -> Path:
    if kind == "a folder in its place":
        (tmp_path / "trials.jsonl").mkdir()
        return tmp_path / "trials.jsonl"
    (tmp_path / "file").touch()
    return tmp_path / "file" / "trials.jsonl"


@pytest.mark.parametrize("kind", ["a folder in its place", "a file in its folder's place"])
def test_a_journal_that_cannot_be_written_stops_no_search_and_says_so_once(tmp_path: Path, kind: str) -> None:
    told: list[str] = []
    journal = Journal(unwritable(tmp_path, kind), "key", told.append)
    assert delta_debug(Trials(step(), TREE, journal=journal)).pins == ("blocks.0.attn", "head")
    assert told == [journal.problem]
    assert "trials.jsonl: " in journal.problem


def test_a_disk_that_fills_during_a_trial_does_not_make_it_deadly(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    def fill(pins: tuple[str, ...]) -> Seen:
        monkeypatch.setattr(os, "fsync", full)
        return Seen(healthy=True)

    journal = Journal(path, "key")
    journal.keep(("embed",), lambda pins: Seen(healthy=False))
    journal.keep(("head",), fill)
    assert journal.problem.endswith(
        "No space left on device; what is tried from here on is lost if the process is killed"
    )
    monkeypatch.undo()
    assert Journal(path, "key").answers == {("embed",): Seen(healthy=False)}
