"""What an entry of the catalogue of codes says of a finding (no torch)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ampdbg.record.findings import Phase, Severity


@dataclass(frozen=True)
class Code:
    """What is known of a finding by its code alone.

    Attributes:
        name: the public name, as in records and ``ampdbg explain``.
        family: the heading that it is listed under.
        verdict: the record's verdict where this is the root finding.
        remedy: what cures it.
        headline: the report's first sentence, a template of :data:`FACTS`; empty where the explanation's title says it.
        information: the same where the finding is no more than information.
        pin_helps: running modules in FP32 may cure its step.
        counts_against_a_patch: a run with the patch that shows it disproves the patch; what no pin could cure does not.
        passes: nor does it where the run goes on: its last steps are finite and taken.
        fails_in_fp32: its step fails in FP32 as well.
        keeps_scale: its step has to be cured at its own loss scale, since a lower one would cure it too.
        erases_itself: the step's loss and gradients are finite.
        in_range_table: the table of ``ampdbg ranges`` shows it.
        why_no_pin: what a search for pins answers where no pin helps; ``{step}`` names the step.
        harms_forward: it may be why a forward pass of its step, or of a later one, fails.
        changes_function: the remedy changes what the model computes.
        is_a_constant: it is a constant of the code that half cannot hold: an edit of its line may be all that it takes.
        remedy_at: by a part of the op's name, a remedy that fits that op better.
        is_of_a_formula: what is to be changed is a formula: its remedy is that of the kind of op that it fails in.
        remedy_near_one: what cures it where the op takes what is taken from 1, and near it.
        remedy_behind_half: what cures it where the op's line computes in FP32 what came to it from half.
        severity, phase, message: those of a misuse, or of an error that autocast causes, which is known by its code.
        is_counted: how often a misuse happens is known: not, where only some passes are looked into.
        harmless_share: a misuse in a smaller share of the steps is no more than information; where this is not 0, so is
            one in a few skipped steps that settle the loss scale.
        remedy_in_library: the remedy of a misuse whose line is a library's, and not the user's to edit.
    """

    name: str
    family: str
    verdict: Literal["precision", "other", "inconclusive"]
    remedy: str
    headline: str
    information: str = ""
    pin_helps: bool = False
    counts_against_a_patch: bool = True
    passes: bool = False
    fails_in_fp32: bool = False
    keeps_scale: bool = False
    erases_itself: bool = False
    in_range_table: bool = False
    why_no_pin: str = "No pin helps: precision is not the cause of what fails at {step}."
    harms_forward: bool = True
    changes_function: bool = False
    is_a_constant: bool = False
    remedy_at: tuple[tuple[str, str], ...] = ()
    is_of_a_formula: bool = False
    remedy_near_one: str = ""
    remedy_behind_half: str = ""
    severity: Severity = "error"
    phase: Phase | None = None
    message: str = ""
    is_counted: bool = True
    harmless_share: float = 0.0
    remedy_in_library: str = ""


FACTS = ("step", "phase", "where", "skips", "losses", "falling", "first", "last", "settles", "verdict")
"""What a headline may name: the finding's step, phase and module; how many steps were skipped; what losses are not
finite; how far the loss scale fell; the first and the last scale; whether it has settled; and, where nothing is wrong,
the verdict."""
