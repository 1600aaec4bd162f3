"""Hypothesis strategies for records: any numbers, infinities and NaN included, any text."""

from __future__ import annotations

from hypothesis import strategies as st

from ampdbg.record.findings import Finding, Source
from ampdbg.record.pins import Pin, PinCost, PinSite, Proof, ProofStep, RootModel, Search, Trial
from ampdbg.record.run import (
    AutocastError,
    BatchFit,
    Costs,
    Environment,
    GroupOverflow,
    HalfUpdates,
    LevelCost,
    Misuse,
    ParameterCounts,
    Record,
    Replay,
    Site,
    Step,
    StepMemory,
    TensorCounts,
    Unseen,
)

# JSON in UTF-8 holds every character but lone surrogates.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
counts = st.integers(min_value=0, max_value=2**40)
floats = st.floats()
plain_data = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


def tuples(items: st.SearchStrategy[object], max_size: int = 3) -> st.SearchStrategy[tuple[object, ...]]:
    return st.lists(items, max_size=max_size).map(tuple)


parameters = st.builds(ParameterCounts, name=texts, inf=counts, nan=counts, size=counts)
groups = st.builds(GroupOverflow, index=st.integers(0, 6), name=texts, parameters=tuples(parameters))
tensors = st.builds(
    TensorCounts,
    kind=st.sampled_from(["batch", "parameter", "buffer"]),
    name=texts,
    inf=counts,
    nan=counts,
    size=counts,
    first_index=tuples(counts),
    when=st.sampled_from(["before", "after"]),
)
steps = st.builds(
    Step,
    step=counts,
    loss=floats,
    scale=floats,
    found_inf=st.booleans(),
    skipped=st.booleans(),
    grad_norm=st.none() | floats,
    groups=tuples(groups),
    nonfinite=tuples(tensors),
    losses=st.dictionaries(texts, floats, max_size=2),
    groups_hit=counts,
)
sources = st.builds(Source, file=texts, line=counts, function=texts, text=texts)
findings = st.builds(
    Finding,
    code=st.sampled_from(["scale-collapse", "forward-overflow", "unknown"]) | texts,
    severity=st.sampled_from(["error", "warning", "info"]),
    step=counts,
    phase=st.sampled_from(["data", "forward", "backward", "optimizer"]),
    message=texts,
    remedy=texts,
    module=texts,
    op=texts,
    parameter=texts,
    source=st.none() | sources,
    evidence=st.dictionaries(texts, plain_data, max_size=2),
    root=st.none(),
)
half_updates = st.builds(
    HalfUpdates,
    steps=counts,
    lost_energy=st.none() | floats,
    lost=tuples(texts),
    vanishing_eps=st.none() | floats,
    spoilt_step=st.none() | counts,
    spoilt=tuples(texts),
)
misuses = st.builds(
    Misuse,
    code=texts,
    step=counts,
    count=counts,
    source=st.none() | sources,
    raised=texts,
)
sites = st.builds(
    Site,
    phase=st.sampled_from(["forward", "backward"]),
    **dict.fromkeys(("module", "op", "dtype"), texts),
    source=st.none() | sources,
    **dict.fromkeys(("order", "calls", "call", "size", "inf", "nan"), counts),
    **dict.fromkeys(("abs_max", "headroom_bits"), floats),
    overflow=st.sampled_from(["", "starts", "carried"]),
    lowest_exponent=st.integers(-64, 31),
    exponents=tuples(counts),
    **dict.fromkeys(("scale_ceiling", "scale_floor"), st.none() | floats),
    is_noise=st.booleans(),
)
checks = st.builds(
    Replay,
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]) | texts,
    **dict.fromkeys(("scale", "loss", "grad_norm"), floats),
    gradients=tuples(texts),
    error=texts,
    inf=counts,
    nan=counts,
)
environments = st.builds(
    Environment,
    **dict.fromkeys(("ampdbg", "python", "torch", "platform", "device", "device_name", "policy"), texts),
    emulated=st.booleans(),
    notes=tuples(texts),
)

costs = st.builds(PinCost, flops=floats, activations=floats, activation_bytes=counts)
pins = st.builds(
    Pin,
    module=texts,
    own=st.booleans(),
    reason=st.none(),
    source=st.none() | sources,
    sites=tuples(
        st.builds(
            PinSite,
            phase=st.sampled_from(["forward", "backward"]),
            **dict.fromkeys(("module", "op", "parameter"), texts),
            source=st.none() | sources,
            value=st.none() | floats,
            call=counts,
        )
    ),
    **dict.fromkeys(("without", "class_name"), texts),
    cost=st.none() | costs,
)
trials = st.builds(
    Trial,
    pins=tuples(texts),
    healthy=st.booleans(),
    **dict.fromkeys(("why", "stage"), texts),
    suspects=tuples(texts),
    runs=counts,
    healthy_runs=counts,
    loss=st.none() | floats,
    seconds=floats,
)
searches = st.builds(
    Search,
    strategy=st.sampled_from(["guided", "ddmin"]),
    outcome=st.sampled_from(["found", "nothing-to-pin", "fp32-fails"]),
    message=texts,
    step=st.none() | counts,
    scale=st.none() | floats,
    **dict.fromkeys(("failed", "tried", "modules", "further", "further_healthy"), counts),
    losses=st.dictionaries(texts, floats, max_size=2),
    cost=st.none() | costs,
    classes=st.dictionaries(texts, tuples(counts), max_size=2),
    roots=tuples(st.builds(RootModel, name=texts, argument=texts, what=texts, is_global=st.booleans())),
)
proofs = st.builds(
    Proof,
    passed=st.booleans(),
    steps=tuples(st.builds(ProofStep, name=texts, passed=st.booleans(), detail=texts)),
)

memories = st.builds(StepMemory, *[counts] * 6)
levels = st.builds(
    LevelCost,
    **dict.fromkeys(("name", "level", "dtype", "error"), texts),
    pins=tuples(texts),
    verdict=st.sampled_from(["healthy", "precision", "inconclusive"]),
    finding=st.none() | findings,
    **dict.fromkeys(("steps", "skipped"), counts),
    **dict.fromkeys(("loss", "apart", "noise", "seconds"), st.none() | floats),
    memory=st.none() | memories,
    flops=st.dictionaries(st.sampled_from(["float16", "float32"]), counts),
    peak=st.none() | counts,
    fit=st.none() | st.builds(BatchFit, counts, tuples(counts), st.booleans(), texts),
)
compared = st.builds(Costs, tuples(levels), st.none() | counts, st.none() | counts, tuples(texts))


def records() -> st.SearchStrategy[Record]:
    """Records of every shape, sensible or not."""
    return st.builds(
        Record,
        command=texts,
        created=texts,
        environment=environments,
        config=st.dictionaries(texts, plain_data, max_size=3),
        verdict=st.sampled_from(["healthy", "precision", "other", "inconclusive"]),
        steps=tuples(steps, max_size=6),
        sites=tuples(sites),
        checks=tuples(checks),
        findings=tuples(findings),
        pins=tuples(pins),
        trials=tuples(trials),
        search=st.none() | searches,
        verification=st.none() | proofs,
        costs=st.none() | compared,
        unseen=st.builds(Unseen, *[tuples(texts)] * 3),
        autocast_error=st.none()
        | st.builds(AutocastError, code=texts, step=counts, message=texts, source=st.none() | sources),
        misuses=tuples(misuses),
        half_updates=st.none() | half_updates,
        groups=tuples(texts, max_size=8),
        planned_steps=counts,
        interrupted=st.booleans(),
        error=texts,
        elapsed=st.floats(min_value=0, max_value=1e9),
    )
