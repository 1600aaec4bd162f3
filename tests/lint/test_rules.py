"""Every rule on its own examples: it finds each marked line of the invalid ones and nothing in the valid ones."""

import re
import sys
from pathlib import Path

import pytest

from ampdbg.lint.engine import fixed, hits_of, wanted_rules
from ampdbg.lint.rule import Rule
from ampdbg.lint.rules import RULES
from ampdbg.lint.settings import Settings
from ampdbg.record.codes import CODES
from ampdbg.source.document import Document

MARK = re.compile(r"# <- ([\w -]+)")
EVERYTHING = Settings()
APEX = Path(__file__).parents[2] / "docs" / "apex.md"


def found(text: str) -> list[tuple[int, str]]:
    """Lines and codes of the hits of all rules; the text decides whether the project trains in half precision."""
    text = MARK.sub("", text)  # no rule reads a mark
    in_half = re.search(r"autocast|\.half\(", text) is not None
    hits = hits_of(Document(text), wanted_rules(text.encode(), EVERYTHING), EVERYTHING)
    told = ((hit.node.lineno, hit.code) for hit in hits if in_half or not hit.in_half_only)  # type: ignore[attr-defined]
    return sorted(told)


def marked(text: str) -> list[tuple[int, str]]:
    lines = enumerate(text.split("\n"), start=1)
    return sorted((number, code) for number, line in lines if (mark := MARK.search(line)) for code in mark[1].split())


INVALID = [pytest.param(text, id=f"{rule.codes[0]}-{n}") for rule in RULES for n, text in enumerate(rule.invalid)]
VALID = [pytest.param(text, id=f"{rule.codes[0]}-{n}") for rule in RULES for n, text in enumerate(rule.valid)]


@pytest.mark.parametrize("text", INVALID)
def test_an_invalid_example_has_hits_only_at_its_marked_lines(text: str) -> None:
    assert found(text) == marked(text) != []


@pytest.mark.parametrize("text", VALID)
def test_a_valid_example_has_no_hits(text: str) -> None:
    assert found(text) == []


AGAIN = """
import torch

def clear(parameters):
    for p in parameters:
        p.grad.zero_()

def after(model):
    clear(model.parameters())

def train(model, loader, held, scaler):
    for x in loader:
        scaler.scale(model(x)).backward()
        scaler.unscale_(held.optimizer)  # <- misuse-accumulate
"""
"""Two backward passes, each with its own unscale_: correct only if a call clears the gradients between them."""

MAY_CLEAR = (
    "held.optimizer.first_step()",
    "held.end()",
    "after(model)",
    "model.end(zero_grad=True)",
    "zero_gradients(model)",
)


@pytest.mark.parametrize("call", MAY_CLEAR)
def test_a_call_that_may_clear_the_gradients_suppresses_the_accumulation_hit(call: str) -> None:
    assert found(f"{AGAIN}        {call}\n") == []


def test_an_unknown_optimizer_call_before_a_continue_may_clear_stale_gradients() -> None:
    [kept] = (rule.invalid[1] for rule in RULES if rule.codes == ("misuse-stale-gradients",))
    assert found(MARK.sub("", kept).replace("        with", "        optimizer.end()\n        with")) == []


@pytest.mark.parametrize("call", ["norm_of(model)", "used = held.end()", "held.optimizer.state_dict()"])
def test_a_call_that_cannot_clear_gradients_keeps_the_accumulation_hit(call: str) -> None:
    assert found(f"{AGAIN}        {call}\n") == marked(AGAIN) != []


@pytest.mark.parametrize("line", ['"""Each p.grad is checked."""', 'print("p.grad is inf")', "p.grad = q.grad = None"])
def test_strings_about_gradients_and_clearing_them_do_not_hide_a_scaled_clip(line: str) -> None:
    [clipped] = (MARK.sub("", rule.invalid[0]) for rule in RULES if "misuse-clip-scaled" in rule.codes)
    assert [code for _, code in found(f"{clipped}        {line}\n")] == ["misuse-clip-scaled"]
    assert found(f"{clipped}        p.grad /= 2\n") == []


def test_a_function_given_the_scaler_may_unscale_a_gradient_penalty() -> None:
    [penalised] = (rule.invalid[0] for rule in RULES if rule.codes == ("misuse-gradient-penalty",))
    [(line, _)] = marked(penalised)
    lines = MARK.sub("", penalised).split("\n")
    assert found("\n".join([*lines[:line], "        grads = unscaled(grads, by=scaler)", *lines[line:]])) == []


@pytest.mark.parametrize(
    ("base", "codes"), [("", ["misuse-no-update"]), ("torch.nn.Module", ["misuse-no-update"]), ("Base", [])]
)
def test_a_base_class_of_another_file_may_update_the_scaler(base: str, codes: list[str]) -> None:
    text = f"""
import torch
from elsewhere import Base

class Trainer({base}):
    def __init__(self):
        self.scaler = torch.amp.GradScaler("cuda")

    def step(self, loss, optimizer):
        self.scaler.scale(loss).backward()
        self.scaler.step(optimizer)
"""
    assert [code for _, code in found(text)] == codes


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.codes[0])
def test_every_code_of_a_rule_has_an_invalid_example(rule: Rule) -> None:
    shown = {code for text in rule.invalid for _, code in marked(text)}
    assert set(rule.codes) <= shown & CODES.keys()
    assert rule.valid


@pytest.mark.parametrize("text", INVALID)
def test_a_fix_removes_its_own_hit_and_adds_no_new_hits(text: str) -> None:
    text = MARK.sub("#", text)
    rules = wanted_rules(text.encode(), EVERYTHING)
    before = hits_of(Document(text), rules, EVERYTHING)
    after = fixed(text, lambda document: hits_of(document, rules, EVERYTHING))
    left = sorted(hit.code for hit in before if hit.fix is None)
    assert sorted(code for _, code in found(after)) == left
    assert (after == text) == all(hit.fix is None for hit in before)


def test_a_zero_division_in_a_mask_value_neither_crashes_nor_is_a_hit() -> None:
    assert (
        found("import torch\nwith torch.autocast('cuda'):\n    y = x.masked_fill(mask, -(0 ** -1)).softmax(-1)\n") == []
    )


def test_the_documented_apex_migration_has_no_hits() -> None:
    before, after = re.findall(r"```python\n(.*?)```", APEX.read_text("utf-8"), re.DOTALL)
    codes = [code for _, code in found(f"import torch\nfrom apex import amp\n{before}")]
    assert codes == ["apex-amp"] * 4
    assert found(f"import torch\n{after}") == []


LOOP = """
import torch
scaler, scheduler = torch.amp.GradScaler("cuda"), torch.optim.lr_scheduler.StepLR(optimizer, 1)
for x in loader:
    with torch.autocast("cuda"):
        loss = model(x)
    scaler.scale(loss).backward()
"""


def test_the_number_of_calls_grows_linearly_with_the_size_of_a_block() -> None:
    works = []
    for count in (100, 200):
        calls = 0

        def counted(frame: object, event: str, argument: object) -> None:
            nonlocal calls
            calls += event == "call"

        before = sys.getprofile()
        sys.setprofile(counted)
        try:
            found(LOOP + "    scaler.step(optimizer)\n    scaler.update()\n    scheduler.step()\n" * count)
        finally:
            sys.setprofile(before)
        works.append(calls)
    assert works[1] < 2.5 * works[0]
