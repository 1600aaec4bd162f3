"""Records of searches, one for each end of a search. Those without a run in runs.py are made by hand."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from ampdbg.record.findings import Finding, Source
from ampdbg.record.pins import Pin, PinCost, PinSite, Search, Trial
from ampdbg.record.run import Record
from tests.report.records import healthy_step, overflow, run, skipped_step
from tests.report.runs import record_of

SCORES = Source("/home/me/model.py", 41, "forward", "    scores = q @ k.transpose(-1, -2)")
RESIDUAL = Source("/home/me/model.py", 58, "forward", "        return x + self.mlp(self.norm2(x))")
LOSS_LINE = Source("/home/me/train.py", 12, "training_step", "    return (logits * 1000.0).square().sum()")

BMM = "aten.bmm.default"

OVERFLOW = Finding(
    "forward-overflow", "error", 3, "forward", f"{BMM} of blocks.2.attn is 81920 in FP32, and infinite in float16",
    "run blocks.2.attn in FP32", "blocks.2.attn", BMM, source=SCORES,
)  # fmt: skip

ATTENTION = Pin(
    "blocks.2.attn", reason=0, without="loss NaN: blocks.2.attn bmm (line 41) reaches 81,920",
    sites=(
        PinSite("forward", "blocks.2.attn", BMM, SCORES, 81920.0),
        PinSite("forward", "blocks.2.attn", "aten.add.Tensor", SCORES, 90000.0),
    ),
    cost=PinCost(0.031, 0.042, 1_200_000), class_name="Attention",
)  # fmt: skip
BLOCK = Pin(
    "blocks.3", own=True, reason=0, without="loss NaN: blocks.3 add.Tensor (line 58) reaches 1.5e+09",
    sites=(PinSite("forward", "blocks.3", "aten.add.Tensor", RESIDUAL, 1.5e9, call=2),),
    cost=PinCost(0.0, 0.0004, 12_000), class_name="Block",
)  # fmt: skip
NAMES = (ATTENTION.name, BLOCK.name)


def searched(search: Search, **fields: object) -> Record:
    """A record of ``ampdbg bisect`` whose step 3 fails."""
    steps = [healthy_step(number) for number in range(3)]
    steps += [skipped_step(number, 65536.0, overflow(0), loss=math.nan) for number in range(3, 8)]
    record = run(steps, command="bisect", verdict="precision", findings=(OVERFLOW,), search=search, groups=("a",) * 38)
    return replace(record, **fields)  # type: ignore[arg-type]


def trial(pins: tuple[str, ...], stage: str, why: str = "") -> Trial:
    return Trial(pins, not why, why, stage, runs=1, healthy_runs=int(not why), loss=2.31, seconds=0.3)


NAN = "loss NaN: blocks.2.attn bmm (line 41) reaches 81,920"
TRIALS = (
    trial(("blocks.2.attn",), "candidates", "loss NaN: blocks.3 add.Tensor (line 58) reaches 1.5e+09"),
    trial(("blocks.2.attn", "blocks.3:own", "head"), "suspects"),
    trial(("blocks.2.attn", "blocks.3:own"), "with fewer"),
    trial(("blocks.2.attn",), "with fewer", "loss NaN: blocks.3 add.Tensor (line 58) reaches 1.5e+09"),
    trial(("blocks.3:own",), "with fewer", NAN),
    trial(NAMES, "the whole set once more"),
    trial(NAMES, "further batch 1"),
    trial(NAMES, "further batch 2"),
    trial(NAMES, "further batch 3", "finite, but far from FP32: the loss is 1.2, and 2.31 in FP32"),
)
FAILING = Search("guided", "found", step=3, scale=65536.0, failed=2, tried=2, modules=48)
FOUND = replace(
    FAILING, candidates=1, minimal=True, further=3, further_healthy=2, losses={"float32": 2.3102, "pinned": 2.3101},
    cost=PinCost(0.031, 0.0424, 1_212_000), classes={"Block": (1, 6), "Attention": (1, 6)},
)  # fmt: skip


def found() -> Record:
    return searched(FOUND, pins=(ATTENTION, BLOCK), trials=TRIALS)


def every_instance() -> Record:
    """Twelve blocks need the same pin, found by a long blind search."""
    pins = tuple(
        replace(
            ATTENTION,
            module=f"transformer.layers.{number}.self_attention",
            class_name="SelfAttention",
            sites=(PinSite("forward", f"transformer.layers.{number}.self_attention", BMM, SCORES, 7e4 + 1e3 * number),),
        )
        for number in range(12)
    )
    names = tuple(pin.name for pin in pins)
    trials = tuple(trial(names[: number % 12], "narrowing", NAN) for number in range(48))
    search = replace(FOUND, strategy="ddmin", candidates=0, classes={"SelfAttention": (12, 12)}, further_healthy=3)
    return searched(search, pins=pins, trials=(*trials, trial(names, "the whole set once more")))


def flaky() -> Record:
    """A step that fails three times in ten."""
    trials = tuple(replace(one, runs=11, healthy_runs=11 if one.healthy else 4) for one in TRIALS[4:6])
    search = replace(FOUND, failed=3, tried=10, repeats=11, further=1, further_healthy=1, classes={})
    return searched(search, pins=(BLOCK,), trials=(replace(trials[0], pins=()), replace(trials[1], pins=(BLOCK.name,))))


def not_again() -> Record:
    last = trial(NAMES, "the whole set once more", NAN)
    search = replace(FOUND, minimal=False, message=f"with the set, a second replay failed: {NAN}", further=0)
    return searched(search, pins=(ATTENTION, BLOCK), trials=(*TRIALS[:5], last))


def fp32_raises() -> Record:
    message = "replayed in FP32, step 3 raised KeyError: 'lr'"
    return searched(Search("guided", "fp32-raises", message, step=3), verdict="inconclusive")


def no_pin_helps() -> Record:
    return _without_a_search(Finding("scale-runaway", "error", 0, "backward", "the loss scale grows without end."))


def misused() -> Record:
    return _without_a_search(Finding("misuse-no-update", "error", 0, "optimizer", "scaler.update() is never called."))


def _without_a_search(finding: Finding) -> Record:
    return searched(Search("guided", "no-pin-helps", finding.message), findings=(finding,), verdict="other")


def not_in_a_module() -> Record:
    pin = Pin("", source=LOSS_LINE, reason=0, sites=(PinSite("forward", "", "aten.pow.default", LOSS_LINE, 1e12),))
    why = "loss inf: pow (line 12) reaches 1e+12"
    message = "what goes wrong is a line of the step or the loss"
    search = replace(FAILING, outcome="not-in-a-module", message=message, candidates=1)
    return searched(search, pins=(pin,), trials=(trial(("head",), "candidates", why), trial(("",), "widened", why)))


def no_set_helps() -> Record:
    message = f"pins do not reach all of the step; with every module pinned, it fails: {NAN}"
    search = replace(FAILING, outcome="no-set-helps", message=message)
    return searched(search, trials=(trial(("head",), "candidates", NAN), trial(("",), "widened", NAN)))


def out_of_trials_without_a_set() -> Record:
    return searched(replace(FAILING, strategy="ddmin", outcome="out-of-trials"), trials=TRIALS[:1])


REAL = ("nothing_to_pin", "fp32_fails", "not_reproduced", "out_of_trials", "interrupted")
"""The ends that a run in runs.py has."""

BISECTIONS: dict[str, Callable[[], Record]] = {
    make.__name__: make
    for make in (found, every_instance, flaky, not_again, fp32_raises, no_pin_helps, misused,
                 not_in_a_module, no_set_helps, out_of_trials_without_a_set)
}  # fmt: skip
BISECTIONS |= {name: partial(record_of, f"bisect_{name}") for name in REAL}
