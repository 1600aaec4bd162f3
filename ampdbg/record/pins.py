"""What a search for pins finds, as the record keeps it: pins, trials, the search and the proof (no torch)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ampdbg.record.findings import Count, Phase, Source

OWN = ":own"
"""Behind a module's name in a pin: only its own lines run in FP32, its children stay as they were."""

EVERYTHING = "*"
"""The root as a pin of the config: the pattern that every name matches."""


def in_words(name: str, root: str = "the model") -> str:
    """A pin, as the config takes it, in a sentence: ``blocks.2.attn``, ``module 2``, ``the model (its own lines)``.

    ``root`` is what the model is called, such as its class.
    """
    module = name.removesuffix(OWN)
    words = f"module {module}" if re.fullmatch(r"[\d.]+", module) else module or root
    return f"{words} (its own lines)" if name.endswith(OWN) else words


Strategy = Literal["guided", "ddmin"]
"""How a set is searched for: by what overflows in a wider format, or blind."""

Form = Literal["diff", "module", "yaml", "json"]
"""What a suggestion is handed over as: a patch of the user's code (also in JSON), a file of pins by name, or pins of
the config."""

Outcome = Literal[
    "found",
    "nothing-to-pin",
    "fp32-fails",
    "fp32-raises",
    "no-pin-helps",
    "not-in-a-module",
    "not-reproduced",
    "no-set-helps",
    "out-of-trials",
]
"""How a search ended. ``fp32-fails``, ``fp32-raises`` and ``no-pin-helps`` were not searched: FP32 is no better, the
user's code raises in FP32, or the cause is the data or the order of calls. ``out-of-trials`` also means interrupted in
the search: a set that was found is healthy, not minimal. An interrupted record with ``found`` was interrupted later."""


def is_line(name: str) -> bool:
    """An atom is a line of a script outside its modules, such as ``train.py:41``."""
    file, _, number = name.rpartition(":")
    return bool(file) and number.isdecimal()


def is_pinned(module: str, pins: Iterable[str]) -> bool:
    """A pin keeps the module's own lines and weights in FP32: its own lines' or that of a module around it."""
    return any(pin in ("", module, module + OWN) or module.startswith(f"{pin}.") for pin in pins)


@dataclass(frozen=True)
class PinSite:
    """An op that goes wrong where a pin is missing: its line, and its value in FP32 against the limit of half."""

    phase: Phase
    module: str
    op: str
    source: Source | None
    value: float | None
    call: Count = 0
    parameter: str = ""


@dataclass(frozen=True)
class PinCost:
    """What leaves FP16 with a pin, as shares (0 to 1) of the whole step: its FLOPs and its activations' bytes."""

    flops: float
    activations: float
    activation_bytes: Count


@dataclass(frozen=True)
class Pin:
    """One member of the suggested set.

    ``module`` is a qualified name ("" is the root). With ``own`` only the module's own lines run in FP32, and its
    children stay in half. Without a module the pin is the statement at ``source``. ``reason`` is the index of the
    finding that it cures, ``sites`` are the ops that go wrong without it, the first to run first; ``without``
    is what happens when it alone is dropped, with those in ``tied``: pins whose modules hold the same parameter, so
    that they are pinned together. ``class_name`` is the module's class.
    """

    module: str
    own: bool = False
    reason: Count | None = None
    source: Source | None = None
    sites: tuple[PinSite, ...] = ()
    without: str = ""
    tied: tuple[str, ...] = ()
    cost: PinCost | None = None
    class_name: str = ""

    @property
    def name(self) -> str:
        """The pin as the config's ``pins`` takes it."""
        return self.module + OWN if self.own else self.module


@dataclass(frozen=True)
class RootModel:
    """One of the several models of a script: the first part of the pins' names, which is no attribute of the script's.

    ``what`` says in words which object it is, ``argument`` is its name in the ``pin_fp32`` of a file. The name
    ``is_global`` where the script itself has that for it; else it is the model's class.
    """

    name: str
    argument: str
    what: str
    is_global: bool = False


def call_of_pins(roots: Sequence[RootModel]) -> str:
    """The call of a file's ``pin_fp32``; ``...`` for a model that has no name in the script."""
    given = (f"{root.argument}={root.name if root.is_global else '...'}" for root in roots)
    return f"pin_fp32({', '.join(given) or 'model'})"


def root_of(pin: str) -> str:
    """Which of several models a pin is of, by its name."""
    return pin.removesuffix(OWN).partition(".")[0]


def within(path: str, pin: str) -> str:
    """A pin as a model has it that is a part of others: ``1.fc:own`` of ``net.1.fc:own``."""
    return pin.removeprefix(path).removeprefix(".")


@dataclass(frozen=True)
class Trial:
    """One experiment: a step run with ``pins`` in FP32 (names as the config's ``pins`` takes them).

    ``stage`` says what it was for. It ran ``runs`` times and was healthy in ``healthy_runs`` of them; the
    trial is ``healthy`` when all were. ``why`` says what was wrong, ``suspects`` which modules went wrong.
    """

    pins: tuple[str, ...]
    healthy: bool
    why: str = ""
    stage: str = ""
    suspects: tuple[str, ...] = ()
    runs: Count = 1
    healthy_runs: Count = 0
    loss: float | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Search:
    """How the pins were found.

    ``step`` is the failing step and ``scale`` its loss scale; ``set_scale`` is the one that goes with the set, where
    gradients overflow above it; unpinned the step failed in ``failed`` of ``tried`` replays, after which each trial
    got ``repeats``. ``candidates`` of the ``modules`` that ran were tried. ``losses`` holds the step's loss by what
    ran: "float16", "float32", "pinned". ``further`` and ``further_healthy`` count the batches that the whole set was
    tried on besides. ``classes`` counts pinned instances of a class against all that the model has, where there are
    several. ``sources`` are the digests (SHA-256) of the user's files that hold the pins' lines, as they were.
    ``roots`` are the models that the pins' names begin with, where a script has several.
    """

    strategy: Strategy
    outcome: Outcome
    message: str = ""
    step: Count | None = None
    scale: float | None = None
    set_scale: float | None = None
    failed: Count = 0
    tried: Count = 0
    repeats: Count = 1
    modules: Count = 0
    candidates: Count = 0
    minimal: bool = False
    further: Count = 0
    further_healthy: Count = 0
    losses: Mapping[str, float] = field(default_factory=dict)
    cost: PinCost | None = None
    classes: Mapping[str, tuple[Count, ...]] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    roots: tuple[RootModel, ...] = ()


@dataclass(frozen=True)
class PatchUnit:
    """One edit that can be left out: what it is, and the names of the pins that it covers.

    ``notes`` are for who reads the patch: why it is no narrower, and what else runs the code that it edits.
    """

    title: str
    pins: tuple[str, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class FileDiff:
    """The change of one file as a unified diff; ``encoding`` gives the diff's bytes back."""

    path: str
    encoding: Literal["utf-8", "latin-1"]
    diff: str


@dataclass(frozen=True)
class Handover:
    """What a suggestion is made of beside the pins and their proof; ``form`` is the one that was proven.

    ``names`` are the pins as the config takes them, and ``helper`` a Python file that pins them. The patch is
    ``files``, whose paths count from ``folder``, the root of a git repository if ``is_git``; ``units`` are its
    edits, or without files the patches that failed, with why. Where no code could be edited ``refused`` says why,
    ``FILE:LINES: reason`` each. ``notes`` are remedies other than pins.
    """

    form: Form
    names: tuple[str, ...] = ()
    helper: str = ""
    folder: str = ""
    is_git: bool = False
    files: tuple[FileDiff, ...] = ()
    units: tuple[PatchUnit, ...] = ()
    refused: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def pins_nothing(self) -> bool:
        """The patch leaves every module in half, and keeps constants in its range."""
        return bool(self.files) and not any(unit.pins for unit in self.units)


@dataclass(frozen=True)
class ProofStep:
    """One thing that was run to prove a patch: what, whether it came out as it must, and what was seen.

    Of one that never ``ran``, such as a batch that is not there, the detail says why: it neither passed nor failed, and
    ``passed`` that nothing speaks against the patch. Of one that ``warns`` the detail is for the user to judge.
    """

    name: str
    passed: bool
    detail: str = ""
    ran: bool = True
    warns: bool = False


@dataclass(frozen=True)
class Proof:
    """The proof of a patch, and every step of it."""

    passed: bool
    steps: tuple[ProofStep, ...] = ()

    @property
    def failure(self) -> str:
        """The first step that did not come out as it must, in words; "" where all did."""
        return next((f"{step.name}: {step.detail}" for step in self.steps if not step.passed), "")

    @property
    def unproven(self) -> str:
        """Why nothing shows that the patch is needed, where it was run and no more; else ""."""
        left_out = [step.detail for step in self.steps if not step.ran]
        return left_out[0] if left_out and len(self.steps) - len(left_out) < 2 else ""
