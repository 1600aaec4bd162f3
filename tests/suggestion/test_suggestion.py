"""Suggestions for a workload: the edit, its place, and the notes for its reader."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ampdbg.config.file import load_config
from ampdbg.pinning import bisection
from ampdbg.proof import suggestion
from ampdbg.proof.jobs import FreshProcesses
from ampdbg.proof.suggestion import Suggestion, suggest
from ampdbg.record.pins import Handover, Proof, ProofStep
from ampdbg.report.suggestion import content
from tests.proof.overflowing import CONFIG, NET, run_in_this_process, written
from tests.siblings import slow_except
from tests.zoo.test_zoo import CASES, FILES, config_of


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts no process for the proof, which takes seconds."""
    monkeypatch.setattr(FreshProcesses, "__call__", run_in_this_process)


def net(layers: str, forward: str, batch: str, functions: str, imported: str = "") -> str:
    """A workload with one model; each of its methods has a body of one line."""
    return f"""\
import torch
import torch.nn.functional as F
from torch import nn
{imported}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        {layers}

    def forward(self, x):
        {forward}


def batches():
    generator = torch.Generator().manual_seed(1)
    return [{batch} for _ in range(6)]


{functions}
"""


def handed_over(found: Suggestion) -> Handover:
    assert found.record.handover is not None
    return found.record.handover


def proven(found: Suggestion) -> str:
    """The text of the suggestion, with its proof."""
    assert found.record.verification is not None
    assert found.record.verification.passed, found.record.verification
    return (content(found.record) or b"").decode()


# Zoo cases: constants are limited to the range of half on their lines, and pins of half weights are settings


def of_zoo(name: str, folder: Path, *overrides: str, **options: Any) -> Suggestion:
    file = next(file for file in FILES if file.stem == name)
    return suggest(load_config(config_of(file, folder), overrides), **options)


ADDED = {
    "mask_constant": "scores = scores.masked_fill(hidden, max(self.fill, torch.finfo(scores.dtype).min))  # <- here",
    "mask_of_a_whole_row": "mask = hidden * max(self.fill, torch.finfo(hidden.dtype).min / 2)  # <- here",
    "eps_in_the_backward_pass": (
        "length = torch.sqrt((h * h).amax(dim=-1, keepdim=True) + max(self.eps, torch.finfo(h.dtype).tiny))  # <- here"
    ),
    "eps_on_a_zero_row": (
        "h = h / (h.abs().amax(dim=-1, keepdim=True) + max(self.eps, torch.finfo(h.dtype).tiny))  # <- here"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ADDED)
def test_a_constant_is_limited_to_the_range_of_half_on_its_line(name: str, tmp_path: Path) -> None:
    found = of_zoo(name, tmp_path)
    lines = proven(found).splitlines()
    assert lines[0] == "# Keeps constants within the range of half precision; no module needs FP32:"
    added = [line.removeprefix("+").strip() for line in lines if line.startswith("+") and not line.startswith("+++")]
    assert added == [ADDED[name]]
    assert found.record.pins  # FP32 would fix it too, and a pin file holds these pins


def test_an_unproven_suggestion_pins_modules_instead_of_limiting_the_constant(tmp_path: Path) -> None:
    handover = handed_over(of_zoo("mask_of_a_whole_row", tmp_path, verify=False))
    assert handover.files
    assert not handover.pins_nothing


@pytest.mark.parametrize("form", slow_except(["yaml"], ["diff", "module", "yaml"]))
def test_pins_of_a_model_at_level_o2_are_proven_as_config_settings(form: str, tmp_path: Path) -> None:
    """Edits of code rely on autocast, which does not run at O2."""
    found = of_zoo("scores_before_scaling", tmp_path, "precision.level=O2", form=form)
    assert proven(found).splitlines()[-3:] == ["precision:", "  pins:", "    - attn:own"]
    handover = handed_over(found)
    assert (handover.names, handover.form, handover.files) == (("attn:own",), "yaml", ())


def test_a_finding_that_no_pin_fixes_gets_no_patch(tmp_path: Path) -> None:
    found = of_zoo("true_nan_forward", tmp_path)
    assert found.record.findings[0].code == CASES["true_nan_forward"].code
    assert (found.record.pins, found.edits, content(found.record)) == ((), (), None)


NORM = """
class Norm(nn.Module):
    def forward(self, x):
        return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + 1e-8)
"""
SMALL = net(
    "self.body, self.norm, self.head = nn.Linear(16, 16), Norm(), nn.Linear(16, 4)",
    "return 0.01 * self.head(self.norm(self.body(x) * 1e-4))",
    "(torch.randn(8, 16, generator=generator), torch.randn(8, 4, generator=generator))",
    "def loss(output, target):\n    return (output.float() - target).pow(2).mean()",
    NORM,
)


@pytest.mark.slow
def test_an_eps_is_not_raised_if_any_eps_of_half_would_exceed_the_values(tmp_path: Path) -> None:
    """FP32's own values there are smaller than any eps of FP16: the loss hardly shows that, the gradients do."""
    found = suggest(written(tmp_path, {"net.py": SMALL}))
    assert found.record.findings[0].code == "eps-underflow"
    patch = proven(found)
    assert "finfo" not in patch
    assert "autocast" in patch
    assert "divides by a value that FP16 rounds to zero" in found.record.pins[0].without
    assert "reaches" not in patch


# The place of the edit


CALLS_A_LIBRARY = net(
    "self.body = nn.Linear(8, 8)",
    "return self.body(x)",
    "(600 * torch.randn(4, 8, generator=generator), torch.zeros(4))",
    "def loss(output, target):\n    return energy_loss(output, target)",
    "from energies import energy_loss\n",
)
LIBRARY = """\
def energy_loss(output, target):
    energy = (output * output).sum(-1)
    return 1e-6 * (energy - target).abs().mean()
"""


def with_library(library: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Suggestion:
    """The suggestion with this installed package."""
    site = folder / "site-packages"
    site.mkdir()
    (site / "energies.py").write_text(library)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delitem(sys.modules, "energies", raising=False)
    return suggest(written(folder, {"net.py": CALLS_A_LIBRARY}), verify=False)


def test_the_users_call_of_a_library_function_is_wrapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = with_library(LIBRARY, tmp_path, monkeypatch)
    assert [unit.title for unit in handed_over(found).units] == ["energy_loss() on line 22 of net.py"]
    (edit,) = found.edits
    assert edit.after.decode().endswith(
        "    with torch.autocast(device_type=output.device.type, enabled=False):\n"
        "        return energy_loss(output.float(), target)\n"
    )


def test_a_library_that_casts_to_fp32_itself_needs_no_patch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = with_library(LIBRARY.replace("output * output", "output.float() ** 2"), tmp_path, monkeypatch)
    assert (found.record.verdict, found.record.pins, found.edits) == ("healthy", (), ())


TIED = net(
    "self.embedding, self.norm, self.head = nn.Embedding(50, 64), nn.LayerNorm(64), nn.Linear(64, 50, bias=False)\n"
    "        self.head.weight = self.embedding.weight\n"
    "        nn.init.constant_(self.norm.weight, 8000.0)",
    "x = self.norm(self.embedding(x))\n        return self.head(x)",
    "((ids := torch.randint(0, 50, (4, 17), generator=generator))[:, :-1], ids[:, 1:])",
    "def loss(output, target):\n    return F.cross_entropy(1e-4 * output.float().flatten(0, 1), target.flatten())",
)


@pytest.mark.slow
def test_tied_modules_are_pinned_as_one_and_the_patch_leaves_the_embedding_unchanged(tmp_path: Path) -> None:
    config = written(tmp_path, {"net.py": TIED})
    found = suggest(config)
    embedding, head = found.record.pins
    assert (embedding.name, embedding.tied, embedding.sites) == ("embedding", ("head",), ())
    assert (head.name, head.tied) == ("head", ("embedding",))
    text = (content(found.record) or b"").decode()
    assert text.startswith("# Keeps in FP32 under autocast: head.\n")
    assert (
        "-        return self.head(x)\n"
        "+        with torch.autocast(device_type=x.device.type, enabled=False):\n"
        "+            return self.head(x)\n"
    ) in text
    by_name = suggest(config, form="module")
    assert proven(by_name)
    assert by_name.record.verification is not None
    assert "without embedding and head" in [step.name for step in by_name.record.verification.steps]


NEAR_ONE = net(
    "self.body = nn.Linear(4, 1)\n        nn.init.constant_(self.body.bias, 9.0)",
    'return [{"heat": self.body(x)}]',
    "(0.1 * torch.randn(8, 4, generator=generator), torch.ones(8, 1))",
    "def probability(x):\n"
    "    return torch.clamp(x.sigmoid_(), min=1e-4, max=1 - 1e-4)\n\n\n"
    "def focal_loss(p, target):\n"
    "    return -(torch.log(1 - p) * p**2 * target).mean()\n\n\n"
    "def step(model, batch):\n"
    '    return focal_loss(probability(model(batch[0])[-1]["heat"]), batch[1])',
)
BY_STEP = CONFIG.replace("loss: {target: net.py:loss}", "step: {target: net.py:step}")
ROUNDED = {
    "a function that writes into its argument is given another": (
        NEAR_ONE,
        "probability() on line 30 of net.py",
        "        probability_out = probability(model_out.float())\n",
    ),
    "its line is edited": (
        NEAR_ONE.replace("sigmoid_", "sigmoid"),
        "line 22 of net.py",
        "        return torch.clamp(x.float().sigmoid(), min=1e-4, max=1 - 1e-4)\n",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("text", "title", "edit"), ROUNDED.values(), ids=ROUNDED)
def test_a_value_that_is_rounded_before_the_failure_is_kept_in_fp32_at_its_source(
    text: str, title: str, edit: str, tmp_path: Path
) -> None:
    found = suggest(written(tmp_path, {"net.py": text}, BY_STEP))
    assert proven(found)
    (unit,) = handed_over(found).units
    assert unit.title == title
    assert unit.notes[0].startswith("Editing line 26 of net.py alone was not enough: the failing step")
    assert edit in found.edits[0].after.decode()


def test_a_value_that_is_computed_in_fp32_needs_no_patch(tmp_path: Path) -> None:
    text = NEAR_ONE.replace('["heat"]', '["heat"].float()')
    found = suggest(written(tmp_path, {"net.py": text}, BY_STEP))
    assert (found.record.pins, found.edits) == ((), ())


# A wider patch is tried if the narrowest one fails


NARROW = ("line 15 of net.py", ())
FAILED = Proof(
    False, (ProofStep("the failing step (0)", True, "healthy"), ProofStep("further batches", False, "loss NaN"))
)


def suggested_where(
    outcomes: Sequence[Proof], folder: Path, monkeypatch: pytest.MonkeyPatch, text: str = NET
) -> tuple[Suggestion, list[Any]]:
    """The suggestion if the proofs have these outcomes in turn, and the job of each proof."""
    jobs: list[Any] = []

    def prove(job: object, *args: object) -> Proof:
        jobs.append(job)
        return outcomes[len(jobs) - 1]

    monkeypatch.setattr(suggestion, "prove", prove)
    return suggest(written(folder, {"net.py": text})), jobs


def test_a_wider_patch_notes_why_the_narrower_one_failed_and_keeps_the_repeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bisection, "_repeats", lambda rate: 2)  # as for a step that fails only sometimes
    found, jobs = suggested_where([FAILED, Proof(True)], tmp_path, monkeypatch)
    said = "#     Editing line 15 of net.py alone was not enough: further batches: loss NaN\n"
    assert said in (content(found.record) or b"").decode()
    assert jobs[0].patched != jobs[1].patched
    assert found.record.search is not None
    assert [found.record.search.repeats, *(job.repeats for job in jobs)] == [2, 2, 2]


@pytest.mark.slow
def test_the_proof_of_the_narrowest_patch_is_reported_if_every_patch_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    also = Proof(False, (ProofStep("the failing step (0)", False, "loss inf"),))
    found, jobs = suggested_where([FAILED, also], tmp_path, monkeypatch)
    assert (found.edits, found.record.verification) == ((), FAILED)
    assert len(jobs) == 2  # the third way gives the patch of the second, which was already tested


@pytest.mark.slow
def test_the_narrowest_patch_has_no_notes_if_its_proof_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = suggested_where([Proof(True)], tmp_path, monkeypatch)
    assert [(unit.title, unit.notes) for unit in handed_over(found).units] == [NARROW]


IN_TWO_FUNCTIONS = net(
    "self.body = nn.Linear(8, 8)",
    "return self.body(x)",
    "torch.randn(2, 16, 8, generator=generator).unbind()",
    "def summed(x):\n"
    "    return x @ torch.full((8, 8), 3e4, device=x.device)\n\n\n"
    "def energy(x):\n"
    "    return 1e-12 * (x * x).mean()\n\n\n"
    "def loss(output, target):\n"
    "    return energy(summed(0.01 * output)) + 1e-9 * summed(output).abs().mean()",
)


@pytest.mark.slow
def test_a_unit_that_is_not_needed_is_left_out_of_the_patch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The FP32 result of the first edit fixes the second line too."""
    needless = ProofStep("without line 25 of net.py", False, "not needed: healthy; loss 1.0000, 1.0000 in FP32")
    outcomes = [Proof(False, (needless,)), Proof(True)]
    found, jobs = suggested_where(outcomes, tmp_path, monkeypatch, IN_TWO_FUNCTIONS)
    assert [(unit.title, unit.notes) for unit in handed_over(found).units] == [("line 21 of net.py", ())]
    assert len(jobs) == 2
    assert found.edits[0].after.count(b"enabled=False") == 1


@pytest.mark.slow
def test_the_next_proof_leaves_out_a_unit_known_to_be_needed_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[list[str]] = []
    third = "1e-12 * (x * x * x).mean()\n\n\ndef loss(output, target):\n    return cubed(summed(0.01 * output)) + "
    text = IN_TWO_FUNCTIONS.replace("def loss(output, target):\n    return ", f"def cubed(x):\n    return {third}")
    needed = ProofStep("without line 21 of net.py", True, "step 0 fails: loss inf")
    needless = ProofStep("without line 25 of net.py", False, "not needed: healthy; loss 1.0000, 1.0000 in FP32")
    outcomes = [Proof(False, (needed, needless)), Proof(True)]

    def prove(job: object, run: object, failing: object, without: dict[str, object], *args: object) -> Proof:
        order.append(list(reversed(without)))
        return outcomes[len(order) - 1]

    monkeypatch.setattr(suggestion, "prove", prove)
    suggest(written(tmp_path, {"net.py": text}))
    assert order == [
        [f"line {number} of net.py" for number in (21, 25, 29)],
        [f"line {number} of net.py" for number in (29, 21)],
    ]


IN_ONE_FUNCTION = net(
    "self.body = nn.Linear(8, 8)",
    "return self.body(x)",
    "torch.randn(2, 16, 8, generator=generator).unbind()",
    "def loss(output, target):\n"
    "    total = output @ torch.full((8, 8), 3e4, device=output.device)\n"
    "    assert total.ndim == 2\n"
    "    return 1e-12 * (total * total).mean() + 1e-9 * total.abs().mean()",
)


@pytest.mark.parametrize("between", slow_except([""], ["    assert total.ndim == 2\n", ""]), ids=["apart", "together"])
def test_a_needless_block_is_left_out_but_not_a_needless_line_next_to_a_needed_one(
    between: str, tmp_path: Path
) -> None:
    text = IN_ONE_FUNCTION.replace("    assert total.ndim == 2\n", between)
    found = suggest(written(tmp_path, {"net.py": text}))
    assert proven(found)
    title = "line 21 of net.py" if between else "lines 21 to 22 of net.py"
    assert [unit.title for unit in handed_over(found).units] == [title]
    assert found.edits[0].after.count(b"enabled=False") == 1


@pytest.mark.slow
def test_a_line_that_cannot_be_edited_blocks_the_patch_only_without_a_proof(tmp_path: Path) -> None:
    """No pin reaches these lines, so the search does not know which of them are needed: only a proof can tell."""
    text = IN_TWO_FUNCTIONS.replace(").mean()", ").mean(); pass")
    config = written(tmp_path, {"net.py": text})
    found = suggest(config)
    assert proven(found)
    assert [unit.title for unit in handed_over(found).units] == ["line 21 of net.py"]
    unproven = suggest(config, verify=False)
    assert unproven.edits == ()
    assert handed_over(unproven).refused == (
        f"{tmp_path / 'net.py'}:25: the line holds several statements; put each on its own line first",
    )


@pytest.mark.slow
def test_positions_in_half_are_created_in_fp32_and_the_model_gets_no_helper(tmp_path: Path) -> None:
    file = next(file for file in FILES if file.stem == "positions_in_half")
    found = suggest(load_config(config_of(file, tmp_path)))
    assert proven(found)
    before, after = (set(text.splitlines()) for text in (found.edits[0].before, found.edits[0].after))
    assert {line.strip() for line in after - before} == {
        b"with torch.autocast(device_type=x.device.type, enabled=False):",
        b"positions = torch.arange(x.shape[1], device=x.device, dtype=torch.float32) + 2048",
    }


@pytest.mark.slow
def test_each_refused_edit_is_reported_once_with_its_file_and_line(tmp_path: Path) -> None:
    text = NET.replace("torch.eye", "F.torch.eye").replace(
        "def forward(self, x):", "def forward(self, x, torch=None, _keep_in_fp32=None):"
    )
    config = written(tmp_path, {"net.py": f"{text}\n\ndef _keep_in_fp32(x):\n    return x\n"})
    found = suggest(config, verify=False)
    assert found.edits == ()
    path = tmp_path / "net.py"
    assert handed_over(found).refused == (
        f"{path}:15: the name torch means something else here; import torch under its own name first",
        f"{path}: it already has a function _keep_in_fp32; add the modules to it by hand, or rename it",
    )
