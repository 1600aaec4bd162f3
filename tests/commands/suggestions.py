"""Hand-made suggestions: a patch of two files, its proof, and its record."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from ampdbg.patch.by_name import module_text
from ampdbg.patch.file_edits import FileEdit, base_folder, file_diff
from ampdbg.proof.suggestion import Suggestion
from ampdbg.record.pins import Handover, PatchUnit, Proof, ProofStep
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
    """A suggestion that edits ``model.py`` and ``parts/train.py``; writes both, unedited, into ``folder``."""
    (folder / "parts").mkdir(parents=True, exist_ok=True)
    files = (folder / "model.py", folder / "parts" / "train.py")
    for file in files:
        file.write_bytes(BEFORE)
    edits = tuple(FileEdit(file, BEFORE, after) for file in files)
    return handed_over(record or proven(), folder, *edits, notes=(f"{folder}/model.py:41: scale before the product",))


def handed_over(record: Record, config_folder: Path, *edits: FileEdit, **fields: Any) -> Suggestion:
    """A suggestion for ``record`` whose patch has one unit for each of ``edits``."""
    folder, is_git = base_folder(edits, config_folder)
    units = tuple(PatchUnit(f"line 2 of {edit.path.name}", (name,)) for edit, name in zip(edits, NAMES, strict=False))
    names = tuple(pin.name for pin in record.pins if pin.source is None)
    handover = Handover(
        form="diff",
        names=names,
        helper=module_text(names) if names else "",
        folder=str(folder),
        is_git=is_git,
        files=tuple(file_diff(edit, folder) for edit in edits),
        units=units,
    )
    handed = replace(handover, **fields)
    return Suggestion(replace(record, command="suggest-fp32", handover=handed), edits)
