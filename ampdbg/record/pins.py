"""The results of a search for pins: pins, trials, the search and the proof (no torch). A pin keeps a module, or only
the module's own lines, in FP32. The rest of the model runs in half."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ampdbg.quantities import module_name
from ampdbg.record.findings import Count, Phase, Source

OWN = ":own"
"""Suffix of a module name in a pin: only the module's own lines run in FP32, and its children do not change."""

EVERYTHING = "*"
"""The pin of the root module: the pattern that matches every name."""


def in_words(name: str, root: str = "the model") -> str:
    """Return how a sentence names a pin: ``blocks.2.attn``, ``module 2``, ``the model (its own lines)``. ``root`` is
    the name of the model, such as its class."""
    return module_name(name.removesuffix(OWN), root) + " (its own lines)" * name.endswith(OWN)


Strategy = Literal["guided", "ddmin"]
"""How the search works: by the ops that overflow in a wider format, or blind."""

Form = Literal["diff", "module", "yaml", "json"]
"""How a suggestion is delivered: a patch of the user's code (also in JSON), a file of pins by name, or config pins."""

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
"""How a search ended.

Three outcomes come without a search: FP32 is not better (``fp32-fails``); the user's code raises in FP32
(``fp32-raises``); or the data or the call order is the cause (``no-pin-helps``). ``out-of-trials`` can also mean an
interrupt during the search: the set is healthy, but not minimal. In an interrupted record, ``found`` means that the
interrupt came later.
"""


def is_line(name: str) -> bool:
    """True if the name is a line of a script outside its modules, such as ``train.py:41``."""
    file, _, number = name.rpartition(":")
    return bool(file) and number.isdecimal()


def is_pinned(module: str, pins: Iterable[str]) -> bool:
    """True if a pin covers the module itself, so that its own lines and weights stay in FP32."""
    return any(pin in ("", module, module + OWN) or module.startswith(f"{pin}.") for pin in pins)


@dataclass(frozen=True)
class PinSite:
    """An op that fails without a pin, with its line. ``value`` is its value in FP32, to compare with the limit of
    half."""

    phase: Phase
    module: str
    op: str
    source: Source | None
    value: float | None
    call: Count = 0
    parameter: str = ""


@dataclass(frozen=True)
class PinCost:
    """The cost of a pin: shares (0 to 1) of the step's FLOPs and activation bytes that leave FP16."""

    flops: float
    activations: float
    activation_bytes: Count


@dataclass(frozen=True)
class Pin:
    """One member of the suggested set.

    Attributes:
        module, class_name: the qualified name of the module ("" is the root) and its class.
        own: only the module's own lines run in FP32. Its children stay in half.
        source: the statement to pin, for a pin without a module.
        reason: the index of the finding that the pin cures.
        sites: the ops that fail without the pin, in order of execution.
        without: the result if only this pin is dropped, with those in ``tied``.
        tied: pins of modules that share a parameter with this one, so that all are pinned together.
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
        """The pin in the syntax of the config's ``pins``."""
        return self.module + OWN if self.own else self.module


@dataclass(frozen=True)
class RootModel:
    """One of several models of a script.

    ``name`` begins the names of its pins, and is not an attribute in the script. It is a global of the script if
    ``is_global``, else the model's class. ``what`` describes the object; ``argument`` is its parameter of ``pin_fp32``.
    """

    name: str
    argument: str
    what: str
    is_global: bool = False


def call_of_pins(roots: Sequence[RootModel]) -> str:
    """Return the call of a file's ``pin_fp32``, with ``...`` for a model without a name in the script."""
    given = (f"{root.argument}={root.name if root.is_global else '...'}" for root in roots)
    return f"pin_fp32({', '.join(given) or 'model'})"


def root_of(pin: str) -> str:
    """Return the name of the model that the pin belongs to, if a script has several."""
    return pin.removesuffix(OWN).partition(".")[0]


def within(path: str, pin: str) -> str:
    """Return the pin relative to the submodel at ``path``: ``1.fc:own`` for ``net.1.fc:own``."""
    return pin.removeprefix(path).removeprefix(".")


@dataclass(frozen=True)
class Trial:
    """One experiment: a step that ran with ``pins`` in FP32 (names in the syntax of the config's ``pins``).

    ``stage`` is the purpose. The trial is ``healthy`` if ``healthy_runs`` equals ``runs``. ``why`` describes the fault,
    and ``suspects`` are the modules that failed.
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

    Attributes:
        step, scale: the failing step and its loss scale.
        set_scale: the loss scale to use with the set, if gradients overflow above it.
        failed, tried, repeats: the failures without pins, the replays without pins, and the resulting runs for each
            trial.
        modules, candidates: how many modules ran, and how many were tried.
        losses: the step's loss by manner of execution: "float16", "float32", "pinned".
        further, further_healthy: how many further batches the set was tried on, and how many were healthy.
        classes: pinned and total instances of each class with several instances.
        sources: SHA-256 digests of the user's files that hold the pins' lines, at the time of the search.
        roots: the models that prefix the pins' names, if a script has several models.
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
    """One edit that can be omitted: its description, and the names of the pins that it covers. ``notes`` are for
    readers of the patch: why the edit is not narrower, and what else runs the edited code."""

    title: str
    pins: tuple[str, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class FileDiff:
    """The change of one file as a unified diff. Encoding ``diff`` with ``encoding`` restores the original bytes."""

    path: str
    encoding: Literal["utf-8", "latin-1"]
    diff: str


@dataclass(frozen=True)
class Handover:
    """The content of a suggestion in the proven ``form``, besides the pins and their proof.

    ``names`` are the pins as the config takes them, and ``helper`` is a Python file that applies them. The patch is
    ``files``, with paths relative to ``folder``, the root of a git repository if ``is_git``. ``units`` are its edits.
    Without ``files``, they are the patches that failed, with the reasons. ``refused`` lists code that could not be
    edited, as ``FILE:LINES: reason``. ``notes`` are remedies besides pins.
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
        """True if the patch leaves every module in half, and only changes constants."""
        return bool(self.files) and not any(unit.pins for unit in self.units)


@dataclass(frozen=True)
class ProofStep:
    """One check of a patch: its name, whether it passed, and what ampdbg observed.

    If the check never ``ran``, for example without the batch, ``detail`` has the reason. ``passed`` then only means
    that nothing contradicts the patch. If it ``warns``, the user must judge ``detail``.
    """

    name: str
    passed: bool
    detail: str = ""
    ran: bool = True
    warns: bool = False


@dataclass(frozen=True)
class Proof:
    """The proof of a patch with all its checks."""

    passed: bool
    steps: tuple[ProofStep, ...] = ()

    @property
    def failure(self) -> str:
        """The first check that failed, in words; "" if all passed."""
        return next((f"{step.name}: {step.detail}" for step in self.steps if not step.passed), "")

    @property
    def unproven(self) -> str:
        """The reason why the proof does not show that the patch is needed, because only the patched run was made;
        else ""."""
        left_out = [step.detail for step in self.steps if not step.ran]
        return left_out[0] if left_out and len(self.steps) - len(left_out) < 2 else ""
