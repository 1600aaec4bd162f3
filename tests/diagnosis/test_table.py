"""Properties of the table of causes: no evidence blames precision if FP32 fails too."""

import math
import string
from dataclasses import fields, replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from ampdbg.agreement import is_finite
from ampdbg.diagnosis.cause import CAUSES, LOST, Evidence, LostLosses
from ampdbg.diagnosis.decisions import Decision, first, holding
from ampdbg.diagnosis.diagnose import ORDER_OF_DECISION, conditions_of, diagnose
from ampdbg.diagnosis.hidden_faults import HIDDEN, HiddenFault
from ampdbg.diagnosis.producers import suspects
from ampdbg.diagnosis.scale import LIMITS, SKIPS, Scaling
from ampdbg.diagnosis.tensors import BATCHES, BUFFERS, STORED, BadTensor
from ampdbg.diagnosis.updates import SMALL, SPOILING, SUMS, HalfUpdates
from ampdbg.record.codes import CODES
from ampdbg.record.findings import Source
from ampdbg.record.run import Investigation, Producer, Record, Replay, ScriptRun
from tests.diagnosis.test_diagnose import FP32, record_of, steps_of

OPS = tuple(
    f"aten.{op}" for op in "mm.default _to_copy.default div.Tensor log.default sum.default sqrt.default".split()
)
sizes = st.sampled_from([0.0, 1e-9, 1.0, 3e4, 6.5e4, 7e4, 1e8, 1e20, math.inf, math.nan])
losses = st.sampled_from([1.0, 0.5, 2e3, 1e9, math.inf, math.nan])
lines = st.builds(Source, st.just("model.py"), st.integers(1, 4), st.just("forward"), st.just("x = q @ k"))


producers: st.SearchStrategy[Producer] = st.builds(
    Producer,
    phase=st.sampled_from(["forward", "backward"]),
    module=st.sampled_from(["", "head", "body.0"]),
    call=st.just(0),
    op=st.sampled_from(OPS),
    source=st.none() | lines,
    dtype=st.sampled_from(["float16", "bfloat16", "float32"]),
    input_largest=sizes,
    output_largest=sizes,
    inf=st.integers(0, 2),
    nan=st.integers(0, 2),
    size=st.just(4),
    fp32_largest=st.none() | sizes,
    finite_in_fp32=st.sampled_from([None, True, False]),
    is_constant=st.booleans(),
    divides_by_zero=st.booleans(),
    leaf=st.sampled_from([None, "[0]"]),
    is_erased=st.booleans(),
    reaches_gradients=st.booleans(),
)


def replays(dtype: str, scale: float = 1.0) -> st.SearchStrategy[Replay]:
    return st.builds(
        Replay,
        dtype=st.just(dtype),
        scale=st.just(scale),
        loss=losses,
        grad_norm=sizes,
        gradients=st.sampled_from([(), ("head.weight",)]),
        producers=st.lists(producers, max_size=2).map(tuple),
        error=st.sampled_from(["", "", "", "RuntimeError: x"]),
        gradient_distance=st.none() | st.sampled_from([0.0, 0.1, 2.0]),
        lost=st.sampled_from([(), ("head.weight",)]),
    )


any_step: st.SearchStrategy[Investigation] = st.builds(
    Investigation,
    step=st.integers(0, 6),
    why=st.sampled_from(["loss", "gradients"]),
    low=replays("float16", 65536.0),
    fp32=st.none() | replays("float32"),
    wide=st.none() | replays("float64"),
    at_lower=st.lists(replays("float16", 1024.0), max_size=1).map(tuple),
    floor=st.none() | replays("float32"),
    loss=losses,
    reproduced=st.integers(0, 1),
    continuation=st.lists(losses, max_size=4).map(tuple),
    batch_largest=st.sampled_from([{}, {"[0]": 7e4}, {"[0]": 1.0}]),
    batch_index=st.sampled_from([{}, {"[0]": (3, 1)}]),
    is_of_others=st.sampled_from([False, False, True]),
    reach=st.sampled_from(["whole", "modules"]),
    weights_grew=st.sampled_from([1.0, 1.01, 3.0, 100.0]),
)
through_in_fp32: st.SearchStrategy[Investigation] = st.builds(
    lambda made, low: replace(
        made, low=low, fp32=FP32, reproduced=1, is_of_others=False, continuation=(), weights_grew=1.0, reach="whole"
    ),
    any_step,
    st.builds(
        lambda low, made: replace(low, error="", producers=(made,)),
        replays("float16", 65536.0),
        producers.map(lambda made: replace(made, inf=1, finite_in_fp32=True, fp32_largest=9e4, input_largest=300.0)),
    ),
)
"""Most of these steps fail because of precision. Other steps rarely reach those rows of the table."""

investigations = any_step | through_in_fp32
runs: st.SearchStrategy[Record] = st.builds(
    lambda pattern, made, script, level: record_of(
        steps_of(pattern), investigations=tuple(made), script=script, config={"precision": level}
    ),
    st.text(alphabet=".xNI", max_size=12),
    st.lists(investigations, max_size=2),
    st.sampled_from([None, ScriptRun("train.py")]),
    st.sampled_from([{"level": "O1"}, {"level": "O1", "loss_scale": 65536.0}]),
)


@given(made=investigations, run=runs)
@settings(max_examples=120)
def test_the_first_matching_row_is_the_cause_and_blames_precision_at_a_suspect_only_if_fp32_is_finite(
    made: Investigation, run: Record
) -> None:
    evidence = Evidence(made, run)
    found = evidence.cause
    row = next(holding(CAUSES, evidence))
    assert row is first(CAUSES, evidence)
    assert found.code == row.code
    assert "{" not in found.message
    assert not found.message.startswith((" ", ";"))
    if CODES[found.code].verdict == "precision":
        assert made.reproduced
        assert not made.is_of_others
        assert is_finite(made.fp32)
        assert not evidence.is_divergence
        sites = [(one.producer.module, one.producer.op, one.producer.source) for one in suspects(made)]
        assert (found.module, found.op, found.source) in sites


@given(run=runs)
@settings(max_examples=40)
def test_a_precision_verdict_needs_a_reproduced_failure_that_is_finite_in_fp32(run: Record) -> None:
    record = diagnose(run)
    if record.verdict == "precision":
        assert any(is_finite(made.fp32) and made.reproduced for made in record.investigations)
    roots = [finding for finding in record.faults if finding.root is None]
    assert len(roots) >= bool(record.faults)
    assert not record.findings or record.findings[0].root is None
    assert all(record.findings[one.root].root is None for one in record.findings if one.root is not None)


MORE: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {},
    optional={
        "wide": replays("bfloat16"),
        "floor": replays("float32"),
        "weights_grew": st.sampled_from([1.0, 100.0]),
        "continuation": st.lists(losses, max_size=4).map(tuple),
        "tries": st.integers(1, 3),
    },
)


@given(made=through_in_fp32, run=runs, more=MORE)
@settings(max_examples=75)
def test_more_evidence_never_moves_a_precision_finding_to_another_site(
    made: Investigation, run: Record, more: dict[str, Any]
) -> None:
    before, after = Evidence(made, run).cause, Evidence(replace(made, **more), run).cause
    if CODES[before.code].verdict == CODES[after.code].verdict == "precision":
        assert (after.module, after.op, after.source) == (before.module, before.op, before.source)


SUBJECTS: tuple[tuple[type, tuple[Decision[Any], ...]], ...] = (
    (Evidence, CAUSES),
    (LostLosses, LOST),
    (BadTensor, (*BATCHES, *BUFFERS, *STORED)),
    (Scaling, (*SKIPS, *LIMITS)),
    (HiddenFault, HIDDEN),
    (HalfUpdates, (*SPOILING, *SUMS, *SMALL)),
)


def test_every_field_that_a_row_names_exists_on_its_subject() -> None:
    for subject, rows in SUBJECTS:
        known = {*dir(subject), *(field.name for field in fields(subject))}
        for row in rows:
            templates = (row.message, row.remedy or "")
            said = [name for one in templates for _, name, _, _ in string.Formatter().parse(one) if name]
            named = {name.partition(".")[0] for name in (*said, *row.evidence.values())}
            assert named <= known, (row.code, named - known)


def test_every_row_has_a_known_code_and_a_unique_condition() -> None:
    rows = [row for family in ORDER_OF_DECISION for row in family.decisions]
    assert len(rows) > 35
    assert {row.code for row in rows} <= CODES.keys()
    conditions = [row.when for row in rows]
    assert len(set(conditions)) == len(conditions)
    assert all(when[0].islower() or when.startswith("FP") for when in conditions)
    assert conditions_of("true-nan") == ("the step is not finite in FP32, nor in FP64",)
