"""The record file: JSON round trips, atomic writes, and clear errors for files that are not records."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import HealthCheck, given, settings

from ampdbg.errors import RecordError
from ampdbg.record.file import from_json, read_record, to_json, write_record
from ampdbg.record.findings import Finding
from ampdbg.record.run import Record, Replay
from tests.report.records import forward_nan, healthy
from tests.strategies import records


def refuse_constant(name: str) -> NoReturn:
    raise AssertionError(f"{name} is not strict JSON")


@given(records())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_record_survives_a_round_trip_through_strict_json(record: Record) -> None:
    text = to_json(record)
    # By repr: NaN is not equal to itself, and 0 == 0.0 == False.
    assert repr(from_json(text)) == repr(record)
    json.loads(text, parse_constant=refuse_constant)


def test_nan_and_infinity_are_written_as_strings() -> None:
    step = json.loads(to_json(forward_nan()))["steps"][3]
    assert (step["loss"], step["grad_norm"]) == ("nan", "inf")


def test_an_unknown_key_in_a_record_is_ignored() -> None:
    data = json.loads(to_json(healthy()))
    data["steps"][0]["new"] = 1
    assert from_json(json.dumps(data)) == healthy()


REPLAY = {"dtype": "float16", "scale": 4.0, "loss": 1.0, "grad_norm": 1.0}
FP32 = {**REPLAY, "dtype": "float32", "scale": 1.0}
LOWER, FP64, FLOOR = {**REPLAY, "scale": 2.0}, {**FP32, "dtype": "float64"}, {**FP32, "rounded": True}


@pytest.mark.parametrize(
    ("why", "replays", "names"),
    [
        ("gradients", (REPLAY,), "low"),
        ("gradients", (REPLAY, FP32, FP64), "low fp32 wide"),
        ("gradients", (REPLAY, FP32, LOWER, LOWER, FLOOR, FP64), "low fp32 at_lower at_lower floor wide"),
        ("end", (REPLAY, FP32, FLOOR), "low fp32 floor"),
    ],
)
def test_replays_of_a_version_2_record_get_their_roles_from_their_order(
    why: str, replays: tuple[dict[str, Any], ...], names: str
) -> None:
    record = from_json(changed(version=2, investigations=[{"step": 3, "why": why, "replays": replays}]))
    (made,) = record.investigations
    roles: dict[str, list[Replay]] = {"low": [], "fp32": [], "at_lower": [], "floor": [], "wide": []}
    for name, replay in zip(names.split(), replays, strict=True):
        roles[name].append(Replay(**replay))
    assert made.reach == ("none" if names == "low" else "whole")
    assert made.at_lower == tuple(roles.pop("at_lower"))
    for name, expected in roles.items():
        assert [one for one in [getattr(made, name)] if one is not None] == expected
    assert repr(from_json(to_json(record))) == repr(record)


def changed(**keys: Any) -> str:
    return json.dumps({**json.loads(to_json(healthy())), **keys})


def without(key: str) -> str:
    return json.dumps({name: value for name, value in json.loads(to_json(healthy())).items() if name != key})


def test_version_2_fields_become_the_replay_reach_and_a_not_reproduced_outcome() -> None:
    made = {"step": 3, "why": "loss", "replays": [REPLAY, FP32, FP64], "has_loss": False, "spoilt": ["[0]"]}
    searched = {"strategy": "guided", "outcome": "spoilt-input", "message": "it fails"}
    record = from_json(changed(version=2, investigations=[made], search=searched))
    assert record.investigations[0].reach == "modules"
    assert record.search is not None
    assert record.search.outcome == "not-reproduced"
    not_again = {**made, "replays": [REPLAY], "reproduced": 0}
    assert from_json(changed(version=2, investigations=[not_again])).investigations[0].reach == "modules"


STEP = {"step": 0, "loss": 1.0, "scale": 1.0, "found_inf": False, "skipped": False}
DAMAGED = {
    "empty": ("", "not a record: "),
    "truncated": (to_json(healthy())[:100], "not a record: EOF while parsing a string at line "),
    "a NaN": (to_json(forward_nan()).replace('"nan"', "NaN"), "not a record: "),
    "a number of 6,000 digits": (to_json(healthy()).replace("50", "1" * 6000), "not a record: number out of range"),
    "another thing": ("[1, 2]", 'it has no "format": "ampdbg.record"'),
    "another format": ('{"format": "other"}', 'it has no "format": "ampdbg.record"'),
    "a later version": (changed(version=4), "a record of version 4; this ampdbg reads versions 2 and 3"),
    "an earlier version": (changed(version=1), "a record of version 1; this ampdbg reads versions 2 and 3"),
    "replays of version 2 that are no list": (
        changed(version=2, investigations=[{"step": 3, "why": "loss", "replays": 3}]),
        "investigations[0].low: missing",
    ),
    "an investigation of version 2 that is none": (changed(version=2, investigations=[3]), "investigations[0]: got 3"),
    "investigations of version 2 that are none": (changed(version=2, investigations=3), "investigations: got 3"),
    "a list for the version": (changed(version=[1]), "a record of version [1]; this ampdbg reads versions 2 and 3"),
    "no verdict": (without("verdict"), "a damaged record: verdict: missing"),
    "a number for the steps": (changed(steps=3), "a damaged record: steps: got 3; needed: a valid tuple"),
    "a step that is no object": (changed(steps=[3]), "a damaged record: steps[0]: got 3; needed: "),
    "a loss in words": (
        changed(steps=[{"step": 0, "loss": "low"}]),
        'steps[0].loss: got "low"; needed: a valid number',
    ),
    "a step without a scale": (changed(steps=[{"step": 0, "loss": 1.0}]), "steps[0].scale: missing"),
    "a step before the first": (changed(steps=[{"step": -1, "loss": 1.0}]), "steps[0].step: got -1; needed: "),
    "an environment that is a list": (changed(environment=[]), "a damaged record: environment: got []; "),
    "a null for the steps": (changed(steps=None), "a damaged record: steps: got nothing; "),
    "text for the losses": (changed(steps=[{**STEP, "losses": "x"}]), 'steps[0].losses: got "x"; '),
    "a finding that is not there": (
        changed(pins=[{"module": "m", "reason": 2}]),
        "a damaged record: pins[0].reason: got 2; there are 0 findings",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_an_invalid_or_damaged_record_is_refused_with_its_path(name: str, tmp_path: Path) -> None:
    text, message = DAMAGED[name]
    path = tmp_path / "record.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RecordError) as caught:
        read_record(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_binary_file_is_refused_as_a_record(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    path.write_bytes(b"PK\x03\x04\xff\xfe")
    with pytest.raises(RecordError, match="not a record: "):
        read_record(path)


def test_deeply_nested_json_raises_a_record_error() -> None:
    with pytest.raises(RecordError):
        from_json("[" * 100_000)


def test_a_lone_surrogate_is_written_as_a_question_mark() -> None:
    record = dataclasses.replace(healthy(), error="bad \ud800 name")
    assert from_json(to_json(record)).error == "bad ? name"


def test_a_device_is_refused_as_a_record() -> None:
    with pytest.raises(RecordError, match="/dev/zero: cannot be read: a device; needed: a file"):
        read_record(Path("/dev/zero"))


def test_a_missing_record_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"absent\.json: cannot be read: No such file"):
        read_record(tmp_path / "absent.json")


def test_write_record_creates_folders_and_read_record_returns_an_equal_record(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "record.json"
    write_record(forward_nan(), str(path))
    assert repr(read_record(path)) == repr(forward_nan())
    assert os.listdir(path.parent) == ["record.json"]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no file modes")
def test_a_record_file_has_the_mode_of_an_ordinary_file(tmp_path: Path) -> None:
    path, ordinary = tmp_path / "record.json", tmp_path / "ordinary"
    ordinary.touch()
    write_record(healthy(), path)
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(ordinary.stat().st_mode)


def full_disk(*args: object) -> NoReturn:
    raise OSError(errno.ENOSPC, "No space left on device")


def interrupted(*args: object) -> NoReturn:
    raise KeyboardInterrupt


class Full:
    """A stream on a full disk."""

    def __enter__(self) -> Full:
        return self

    def __exit__(self, *details: object) -> None:
        pass

    write = staticmethod(full_disk)


opened = Path.open


def opened_on_a_full_disk(path: Path, mode: str) -> Full:
    opened(path, mode).close()
    return Full()


@pytest.mark.parametrize(
    ("owner", "call", "fails"),
    [
        (os, "fsync", full_disk),
        (os, "replace", full_disk),
        (Path, "open", opened_on_a_full_disk),
        (os, "fsync", interrupted),
    ],
    ids=["full when all is written", "full at the end", "full while writing", "an interrupt"],
)
def test_a_failed_or_interrupted_write_keeps_the_old_file_and_leaves_no_other(
    owner: object, call: str, fails: Callable[..., object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "record.json"
    path.write_text("old", encoding="utf-8")
    with monkeypatch.context() as patched:
        patched.setattr(owner, call, fails)
        with pytest.raises((RecordError, KeyboardInterrupt)) as caught:
            write_record(healthy(), path)
    assert caught.type is (KeyboardInterrupt if fails is interrupted else RecordError)
    said = f"{path}: cannot be written: No space left on device"
    assert fails is interrupted or str(caught.value) == said
    assert path.read_text(encoding="utf-8") == "old"
    assert os.listdir(tmp_path) == ["record.json"]


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="folders are always writable for root and on Windows")
def test_a_write_without_permission_names_the_record_file(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(RecordError, match=r"record\.json: cannot be written: Permission denied"):
        write_record(healthy(), tmp_path / "record.json")
    tmp_path.chmod(0o700)


def test_a_write_below_a_regular_file_names_the_record_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RecordError, match=r"record\.json: cannot be written: "):
        write_record(healthy(), tmp_path / "file" / "record.json")


def test_the_optional_fields_of_a_finding_default_to_none_or_empty() -> None:
    finding = Finding("unknown", "warning", 3, "backward", "one replay of three failed")
    assert (finding.source, finding.root, dict(finding.evidence)) == (None, None, {})


def test_write_record_refuses_an_object_that_is_not_a_record(tmp_path: Path) -> None:
    nothing: Any = None
    with pytest.raises(TypeError, match=r"^got a NoneType instead of a Record; allowed: write_record\(record, path"):
        write_record(nothing, tmp_path / "new" / "r.json")
    assert [*tmp_path.iterdir()] == []
