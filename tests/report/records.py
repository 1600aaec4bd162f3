"""Records and steps made by hand, for tests of single sentences. Whole pages come from real runs (runs.py)."""

import math
from collections.abc import Sequence
from dataclasses import replace

from ampdbg.record.findings import Finding, Source
from ampdbg.record.run import Environment, GroupOverflow, ParameterCounts, Record, Replay, Step

ENVIRONMENT = Environment("0.1.0", "3.12.4", "2.6.0", "Linux-x86_64", "cpu", "", policy="cuda", emulated=True)

LAYERS = (*(f"blocks.{block}.{part}" for block in range(6) for part in ("attn.qkv", "attn.proj", "mlp.fc")), "head")
NAMES = tuple(f"{layer}.{kind}" for layer in LAYERS for kind in ("weight", "bias"))


def overflow(*indices: int, inf: int = 3, nan: int = 0, names: Sequence[str] = NAMES) -> tuple[GroupOverflow, ...]:
    """One overflowing group for each index, with the parameter that gives its name."""
    return tuple(
        GroupOverflow(index, names[index], (ParameterCounts(names[index], inf, nan, size=4096),)) for index in indices
    )


def healthy_step(number: int, scale: float = 65536.0) -> Step:
    return Step(number, loss=4.2 / (1 + 0.02 * number), scale=scale, found_inf=False, skipped=False, grad_norm=0.83)


def skipped_step(number: int, scale: float, groups: tuple[GroupOverflow, ...], loss: float = 2.5) -> Step:
    return Step(number, loss, scale, found_inf=True, skipped=True, grad_norm=math.inf, groups=groups)


def run(steps: Sequence[Step], **fields: object) -> Record:
    """A completed scan over ``steps`` of a model with the parameters ``NAMES``."""
    config = {"model": {"target": "model.py:build_model"}}
    record = Record("scan", "2025-01-02T03:04:05Z", ENVIRONMENT, config, "healthy", tuple(steps), groups=NAMES)
    record = replace(record, planned_steps=len(steps), elapsed=12.3)
    return replace(record, **fields)  # type: ignore[arg-type]


def healthy() -> Record:
    return run([healthy_step(number) for number in range(50)])


def calibration() -> Record:
    settling = [skipped_step(0, 65536.0, overflow(36)), skipped_step(1, 32768.0, overflow(36))]
    message = "2 steps were skipped until the loss scale fitted the gradients (16384); the loss falls since."
    finding = Finding("scale-calibration", "info", 0, "backward", message)
    return run([*settling, *(healthy_step(number, 16384.0) for number in range(2, 50))], findings=(finding,))


def collapse() -> Record:
    """A run whose loss scale halves at every second step from step 10 on."""
    scales = [65536.0 / 2 ** max(0, (number - 9) // 2) for number in range(50)]
    steps = [
        skipped_step(number, scale, overflow(*((0, 1) if number % 4 else (0,)), inf=2 * number))
        if number >= 10 and number % 2 == 0
        else healthy_step(number, scale)
        for number, scale in enumerate(scales)
    ]
    message = (
        "gradients are not finite in 20 of 50 steps, although the loss is; step 12 narrows it down to 1 of 38 groups: "
        "blocks.0.attn.qkv.weight"
    )
    remedy = "compare with a run in FP32: --set precision.level=O0"
    gradients = Finding("unknown", "error", 10, "backward", message, remedy, "blocks.0.attn.qkv")
    gradients = replace(gradients, parameter="blocks.0.attn.qkv.weight")
    falling = Finding(
        "scale-collapse", "error", 10, "backward", "the loss scale keeps falling, from 65536 to 0.0625", root=0
    )
    return run(steps, verdict="inconclusive", findings=(gradients, falling))


def forward_nan() -> Record:
    everywhere = overflow(*range(len(NAMES)), inf=0, nan=4096)
    steps = [healthy_step(number) for number in range(3)]
    steps += [skipped_step(number, 65536.0 / 2 ** (number - 3), everywhere, math.nan) for number in range(3, 20)]
    message = "aten.bmm.default has finite inputs and an infinite result in float16."
    source = Source("model.py", 41, "forward", "    scores = q @ k.transpose(-1, -2)")
    found = Finding("forward-overflow", "error", 3, "forward", message, module="blocks.2.attn", source=source)
    return run(steps, verdict="precision", findings=(replace(found, op="aten.bmm.default"),))


def interrupted() -> Record:
    return replace(run([healthy_step(number) for number in range(12)]), interrupted=True, planned_steps=50)


LOST = Replay("float16", 1.0, math.nan, math.nan)
"""The replay of a step whose loss is NaN."""
