"""Suggestions made by hand: a patch of two files, its proof, and their record."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ampdbg.patch.plan import FileEdit, Patch, PatchUnit
from ampdbg.proof.suggestion import Suggestion
from ampdbg.record.pins import Proof, ProofStep
from ampdbg.record.run import Record
from tests.report.bisections import NAMES, found

BEFORE = b"def forward(self, x):\n    y = x @ x\n    return y\n"
AFTER = b"def forward(self, x):\n    y = x.float() @ x.float()\n    return y\n"

PROOF = Proof(
    True,
    (
        ProofStep("the failing step (3)", True, "healthy; loss 2.3101, 2.3102 in FP32"),
        ProofStep("without line 2 of model.py", True, "step 3 fails: loss NaN"),
    ),
)
FAILED = Proof(False, (PROOF.steps[0], ProofStep("further batches", False, "1 of 3 healthy; loss NaN")))


def proven() -> Record:
    return replace(found(), command="suggest-fp32", verification=PROOF)


def suggestion(folder: Path, *, record: Record | None = None, after: bytes = AFTER) -> Suggestion:
    """One edit of ``model.py`` and one of ``parts/train.py`` in ``folder``, where both are written as they were."""
    (folder / "parts").mkdir(parents=True, exist_ok=True)
    files = (folder / "model.py", folder / "parts" / "train.py")
    for file in files:
        file.write_bytes(BEFORE)
    return Suggestion(
        record=record or proven(),
        patch=patch_of(FileEdit(files[0], BEFORE, after), FileEdit(files[1], BEFORE, after)),
        names=NAMES,
        notes=(f"{folder}/model.py:41: scale before the product",),
    )


def patch_of(*edits: FileEdit) -> Patch:
    units = tuple(PatchUnit(f"line 2 of {edit.path.name}", (name,)) for edit, name in zip(edits, NAMES, strict=False))
    return Patch(tuple(edits), units, {unit.title: () for unit in units})
