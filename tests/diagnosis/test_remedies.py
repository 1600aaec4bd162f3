"""Remedies: the alternatives that a finding's op and source line add, and the remedies besides a pin."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from ampdbg.diagnosis.diagnose import diagnose
from ampdbg.diagnosis.producers import Suspect
from ampdbg.diagnosis.remedies import OR, other_remedies, remedy_of, scales_after_its_product, takes_a_sum
from ampdbg.record.codes import CODES, Code
from ampdbg.record.findings import Finding, Phase, Source
from ampdbg.record.run import Investigation, Producer, Replay, Step
from tests.diagnosis.test_diagnose import record_of, steps_of
from tests.report.records import healthy_step, run

LINE = Source("/home/me/model.py", 41, "forward", "    scores = q @ k.transpose(-1, -2) / math.sqrt(d)")
PRODUCER = Producer("forward", "attn", 0, "aten.bmm.default", LINE, "float16", 1.0, 1.0, 1, 0, 4)


def finding(code: str, remedy: str = "", **fields: object) -> Finding:
    found = Finding(code, "error", 3, "forward", "it fails", remedy or CODES[code].remedy)
    return replace(found, **fields)  # type: ignore[arg-type]


def others(*findings: Finding) -> tuple[str, ...]:
    return other_remedies(run([healthy_step(0)], findings=findings))


ADDED = {
    "a product that is scaled": (PRODUCER, "scale before the product: (q * s) @ k instead of (q @ k) * s"),
    "a sum": (replace(PRODUCER, op="aten.sum.dim_IntList"), "add up in FP32: sum(..., dtype=torch.float32)"),
    "a loss that sums": (
        replace(PRODUCER, phase="backward", op="aten.mul.Tensor", source=replace(LINE, text="loss = x.sum()")),
        "take a mean instead of the sum (this scales the loss, and with it the learning rate that fits)",
    ),
}


@pytest.mark.parametrize(("at", "added"), ADDED.values(), ids=ADDED.keys())
def test_the_source_line_adds_an_alternative_that_is_listed_besides_the_pin(at: Producer, added: str) -> None:
    remedy = remedy_of("gradient-overflow", at)
    assert remedy == f"{CODES['gradient-overflow'].remedy}{OR}{added}"
    assert others(finding("gradient-overflow", remedy, source=LINE)) == (f"/home/me/model.py:41: {added}",)


@pytest.mark.parametrize(
    "text", ["x = self.proj(x)", 'n = torch.einsum("nlhd,nhd->nlh", q, k_sum)', "logits = (q * self.scale) @ k.mT"]
)
def test_a_product_that_is_not_scaled_afterwards_adds_no_alternative(text: str) -> None:
    remedy = remedy_of("forward-overflow", replace(PRODUCER, source=replace(LINE, text=text)))
    assert remedy == CODES["forward-overflow"].remedy
    assert others(finding("forward-overflow", remedy)) == ()


@pytest.mark.parametrize(
    ("line", "is_scaled"),
    [
        ("scores = q @ k.transpose(-1, -2) / math.sqrt(d)", True),
        ("    return self.scale * torch.einsum('bqd,bkd->bqk', q, k)", True),
        ("w = torch.bmm(q, k).softcap(5).mul_(s)", True),
        ("x = f((torch.matmul(q, k) + bias) / d)", True),
        ("logits = (q * self.scale) @ k.transpose(-2, -1)", False),
        ("x = torch.bmm(q / d, k)", False),
        ("x = a / (b @ c)", False),  # a product in the divisor is not scaled
        ("x = self.proj(x) * 2", False),
        ("scores = q @ k.transpose(  # the statement goes on", False),
        ("", False),
    ],
)
def test_a_line_scales_its_product_only_if_the_scaling_follows_the_product(line: str, is_scaled: bool) -> None:
    assert scales_after_its_product(line) is is_scaled


@pytest.mark.parametrize(
    ("line", "is_sum"),
    [
        ("return x.sum()", True),
        ("y = torch.sum(x, 0)", True),
        ("loss = F.mse_loss(a, b, reduction='sum')", True),
        ("k_sum = k.mean()", False),
        ("loss = F.mse_loss(a, b, reduction='mean')", False),
        ("x.sum(", False),
    ],
)
def test_a_line_takes_a_sum_if_it_calls_sum_or_a_loss_with_sum_reduction(line: str, is_sum: bool) -> None:
    assert takes_a_sum(line) is is_sum


def test_nll_loss_has_its_own_remedy_for_a_true_nan() -> None:
    assert "ignore_index" in remedy_of("true-nan", replace(PRODUCER, op="aten.nll_loss_forward.default"))


@pytest.mark.parametrize(
    ("phase", "op", "line", "told"),
    [
        ("forward", "log", "psnr = -10.0 * torch.log(x) / torch.log(torch.tensor([10.0]))", "the logarithm's argument"),
        ("forward", "div", "loss = (nll * w).sum() / w.sum()", "the divisor"),
        ("forward", "reciprocal", "loss = (disp - 1 / (acc * 0)).abs().mean()", "the divisor"),
        ("forward", "div", "x = F.normalize(x)", "the divisor"),
        ("forward", "sqrt", "d = (x * x).sum().sqrt() / n", "the square root"),
        ("forward", "div", "d = (a - b).pow(2).sum().sqrt()", "the square root"),
        ("backward", "div", "d = (a - b).pow(2).sum().sqrt()", "the square root"),
        ("backward", "mul", "d = (a - b).pow(2).sum() ** 0.5 / 3", "the square root"),
        ("backward", "div", "x = torch.where(m, x / n, 0)", "the divisor"),
        ("backward", "div", "x = torch.where(m, x.log(), 0)", "the logarithm's argument"),
        ("backward", "div", "x = x.sqrt() / n", ""),
        ("backward", "div", "d = torch.cdist(a, b)", ""),
        ("forward", "pow", "x = x.pow(0.3) + y.sqrt()", ""),
        ("forward", "div", "x = x.log().sqrt()", ""),
    ],
)
@pytest.mark.parametrize("code", ["true-nan", "infinite-loss"])
def test_a_formula_remedy_names_its_undefined_operand(code: str, phase: Phase, op: str, line: str, told: str) -> None:
    at = replace(PRODUCER, phase=phase, op=f"aten.{op}.Tensor", source=replace(LINE, text=line))
    remedy = remedy_of(code, at)
    named = [part for part in ("the logarithm's argument", "the divisor", "the square root") if part in remedy]
    assert named == [told] * bool(told)
    assert remedy.endswith("; no precision helps")
    assert (remedy == CODES[code].remedy) is not bool(told)


def test_only_ctc_loss_is_advised_to_use_zero_infinity() -> None:
    remedies = [remedy_of("infinite-loss", replace(PRODUCER, op=f"aten.{op}.default")) for op in ("_ctc_loss", "exp")]
    assert ["zero_infinity" in remedy for remedy in remedies] == [True, False]


def test_a_larger_eps_is_listed_besides_the_pin_as_changing_the_function() -> None:
    (line,) = others(finding("eps-underflow"))
    assert line == ("use an eps of at least 1e-6, which FP16 can hold (changes the model's function)")


def test_two_logarithms_with_one_of_1_minus_p_get_both_limits() -> None:
    line = "loss = -(y * torch.log(p) + (1.0 - y) * torch.log(1.0 - p)).mean()"
    remedy = remedy_of("eps-underflow", replace(PRODUCER, op="aten.log.default", source=replace(LINE, text=line)))
    assert "an eps of at least 1e-6" in remedy
    assert "where it is of 1 - p, clamp p to at most 0.9990" in remedy


@pytest.mark.parametrize(
    ("line", "is_near_one"),
    [
        ("neg = torch.log(1 - pred) * torch.pow(pred, 2)", True),
        ("return torch.log((1.0 - p) + 1e-6)", True),
        ("x = x / (x.norm() + 1e-8)", False),
        ("y = torch.log(x.clamp(1e-4, 1 - 1e-4))", False),
        ("loss = -(y * torch.log(p + 1e-8) + (1 - y) * torch.log(1 - p + 1e-8)).sum()", False),
        ("loss = -((1 - y) * (p + 1e-8).log()).mean()", False),
        ("loss = -(torch.log(1 - p) / (1 - y.mean()) / math.log(2)).mean()", True),
        ("loss = -log(1 - p).mean()", True),
        ("loss = nll(1 - p)", False),
    ],
)
def test_no_eps_is_advised_if_every_logarithm_is_of_1_minus_p(line: str, is_near_one: bool) -> None:
    _is_near_one(replace(PRODUCER, op="aten.log.default", source=replace(LINE, text=line)), is_near_one)


@pytest.mark.parametrize(
    ("op", "phase", "line", "said"),
    [
        (
            "rsqrt",
            "backward",
            "return torch.acos(c)",
            "makes the derivative of acos at a value that FP16 rounds to -1 or 1",
        ),
        ("rsqrt", "backward", "return c.asin_().sum()", "makes the derivative of asin at a value"),
        ("rsqrt", "forward", "return torch.acos(c)", "divides by a value that FP16 rounds to zero"),
        ("atanh", "forward", "return torch.atanh(c)", "is given a value that FP16 rounds to -1 or 1"),
        ("div", "backward", "return x / c", "divides by a value that FP16 rounds to zero"),
        (
            "div",
            "backward",
            "sine = torch.sqrt((1.0 - torch.pow(c, 2)).clamp(0, 1))",
            "makes the derivative of a root at a value that FP16 rounds to zero",
        ),
        (
            "div",
            "backward",
            "return p.log().mean()",
            "makes the derivative of a logarithm at a value that FP16 rounds to zero",
        ),
        ("div", "backward", "return x / c.sqrt()", "divides by a value that FP16 rounds to zero"),
        ("div", "forward", "y = mine(c.sqrt())", "divides by a value that FP16 rounds to zero"),
    ],
)
def test_an_eps_underflow_names_the_pole_of_the_function_on_its_line(
    op: str, phase: Phase, line: str, said: str
) -> None:
    at = replace(PRODUCER, op=f"aten.{op}.default", phase=phase, source=replace(LINE, text=line))
    suspect = Suspect(Investigation(0, "loss", Replay("float16", 1.0, 1.0, 1.0)), at)
    assert suspect.takes_a_pole.startswith(said)
    assert ("clamp p to at most 0.9990" in remedy_of("eps-underflow", at)) is ("rounds to zero" not in said)


@pytest.mark.parametrize(
    ("phase", "line", "is_near_one"),
    [
        ("forward", "odds = torch.log(q) * p / (1 - p)", True),
        ("forward", "odds = (1 - p).log() / p", False),
        ("forward", "odds = p.div(1 - p)", True),
        ("forward", "odds = (1 - p).div(p)", False),
        ("forward", "scale = (1 - p).rsqrt()", True),
        ("backward", "odds = torch.log(q) * p / (1 - p)", False),
        ("backward", "loss = -torch.log(1 - p).mean()", True),
    ],
)
def test_only_a_quotient_by_1_minus_p_advises_to_compute_p_in_fp32(phase: Phase, line: str, is_near_one: bool) -> None:
    source = replace(LINE, text=line)
    _is_near_one(replace(PRODUCER, op="aten.div.Tensor", phase=phase, source=source), is_near_one)


def _is_near_one(at: Producer, is_near_one: bool) -> None:
    remedy = remedy_of("eps-underflow", at)
    assert ("1e-6" in remedy) is not is_near_one
    assert remedy.startswith("compute p itself in FP32") is is_near_one
    assert len(others(finding("eps-underflow", remedy))) == 1


@pytest.mark.parametrize(
    ("phase", "dtype", "is_behind"),
    [("backward", "float32", True), ("backward", "float16", False), ("forward", "float32", False)],
)
def test_an_fp32_gradient_is_not_advised_to_compute_the_statistic_in_fp32(
    phase: Phase, dtype: str, is_behind: bool
) -> None:
    root = replace(LINE, text="loss = ((gradients.pow(2).sum(1).sqrt() - 1) ** 2).mean()")
    remedy = remedy_of("eps-underflow", replace(PRODUCER, phase=phase, op="aten.div.Tensor", dtype=dtype, source=root))
    assert ("compute this statistic in FP32" in remedy) is not is_behind
    assert ("autocast disabled" in remedy) is is_behind
    assert len(others(finding("eps-underflow", remedy))) == 1


def underflow(steps: Sequence[Step], loss_scale: object = None) -> str:
    """The remedy for gradients that are flushed to zero at the last step's scale."""
    replays = (Replay("float16", steps[-1].scale, 1.0, 1.0, lost_energy=0.5), Replay("float32", 1.0, 1.0, 1.0))
    made = Investigation(steps[-1].step, "end", *replays, loss=1.0)
    config = {"precision": {} if loss_scale is None else {"loss_scale": loss_scale}}
    findings = diagnose(replace(record_of(steps, investigations=(made,)), config=config)).findings
    return next(found.remedy for found in findings if found.code == "gradient-underflow")


def test_gradient_underflow_has_another_remedy_under_a_dynamic_scaler() -> None:
    healthy, fell = ([replace(step, scaler=1) for step in steps_of(pattern)] for pattern in ("....", "xx.."))
    for steps, given in ((healthy, 65536.0), (steps_of("...."), None)):
        assert underflow(steps, given) == CODES["gradient-underflow"].remedy
    begun, fallen = underflow(healthy), underflow(fell)
    assert "init_scale" in begun
    assert "GradScaler: at a larger scale other gradients overflow" in fallen


@pytest.mark.parametrize("code", [code for code in CODES.values() if not code.pin_helps])
def test_a_code_that_no_pin_helps_lists_its_own_remedy(code: Code) -> None:
    (line,) = others(finding(code.name))
    assert line.removesuffix(" (changes the model's function)") == code.remedy


def test_caused_findings_and_information_list_no_remedy() -> None:
    explained, information = finding("scale-runaway", root=0), finding("scale-calibration", severity="info")
    assert len(others(finding("mask-constant"), explained, information)) == 1


def test_equal_remedies_are_listed_once() -> None:
    assert len(others(finding("mask-constant"), finding("mask-constant", step=9))) == 1


def test_a_healthy_run_has_no_other_remedies() -> None:
    assert others() == ()
