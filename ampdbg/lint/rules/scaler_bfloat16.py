"""An enabled scaler in a file in which every autocast uses bfloat16."""

from __future__ import annotations

from collections.abc import Iterator

from ampdbg.lint.facts import Facts
from ampdbg.lint.rule import BACKWARD, LOOP, STEP, Rule, RuleHit

CODE = "misuse-scaler-bfloat16"


def check(facts: Facts) -> Iterator[RuleHit]:
    """Check each such scaler if nothing of the file can be in float16."""
    dtypes = {one.dtype for one in facts.autocasts if one.enabled is not False}
    text = facts.document.text
    others = ("torch.float16", "fp16", "torch.half", ".half()", '"float16')
    if dtypes == {"bfloat16"} and not any(word in text for word in others):
        for scaler in facts.scalers:
            if facts.is_surely_on(scaler):
                yield RuleHit(CODE, scaler)


_BFLOAT16 = LOOP.replace('autocast("cuda")', 'autocast("cuda", dtype=torch.bfloat16)') + BACKWARD + STEP
_MARK = "  # <- misuse-scaler-bfloat16"

RULE = Rule(
    (CODE,),
    ("GradScaler", "bfloat16"),
    check,
    invalid=(_BFLOAT16.replace('GradScaler("cuda")', f'GradScaler("cuda"){_MARK}'),),
    valid=(
        _BFLOAT16.replace('GradScaler("cuda")', 'GradScaler("cuda", enabled=False)'),
        _BFLOAT16.replace("bfloat16", "float16"),
    ),
)
