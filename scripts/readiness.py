"""Makes the table of docs/readiness.md: what `ampdbg ranges` says of bfloat16 configs of seven families.

    python scripts/readiness.py                # all of them, which needs transformers: minutes
    python scripts/readiness.py gemma3         # prints the rows of those alone

Each is a language model of transformers with two layers of 32 channels and random weights. In the rows with a large
residual stream the weights that write to it in the first layer were multiplied until it reaches twice FP16's largest
number. What is said is held against training in emulated FP16: exit code 1 where that comes out otherwise.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ampdbg
from ampdbg.quantities import multiple, scale
from ampdbg.record.pins import in_words
from ampdbg.record.run import Readiness

PAGE = Path(__file__).resolve().parent.parent / "docs" / "readiness.md"
BEGIN, END = "<!-- made by scripts/readiness.py -->\n", "<!-- until here -->"

LARGE = 2 * 65504.0
STEPS = 8
LAYER = "model.layers.0"


@dataclass(frozen=True)
class Family:
    """``kind`` is transformers' name of the config. The parameters ``grow`` of the first layer make ``writer`` write
    more to the residual stream; ``zero`` is what they are at no output."""

    kind: str
    writer: str
    grow: tuple[str, ...]
    zero: float = 0.0
    settings: Mapping[str, Any] = field(default_factory=dict)


NORM, DENSE, EXPERTS = "post_feedforward_layernorm", "mlp.down_proj", "mlp.experts"
OF_NORM = (f"{NORM}.weight",)
OF_DENSE = tuple(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down"))
OF_EXPERTS = tuple(f"{EXPERTS}.{name}_proj" for name in ("gate_up", "down"))
SLIDING = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
PER_LAYER = {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
GATED = {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 1, "linear_num_value_heads": 2}

FAMILIES = {
    "gemma3": Family("gemma3_text", NORM, OF_NORM, -1.0, SLIDING | {"query_pre_attn_scalar": 16}),
    "gemma3n": Family(
        "gemma3n_text",
        NORM,
        OF_NORM,
        0.0,
        SLIDING | PER_LAYER | {"laurel_rank": 4, "activation_sparsity_pattern": [0.0, 0.0]},
    ),
    "gemma4": Family("gemma4_text", NORM, OF_NORM, 0.0, SLIDING | PER_LAYER | {"global_head_dim": 16}),
    "gpt_oss": Family("gpt_oss", EXPERTS, OF_EXPERTS, 0.0, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_5": Family(
        "qwen3_5_text", DENSE, OF_DENSE, 0.0, GATED | {"layer_types": ["linear_attention", "full_attention"]}
    ),
    "qwen3_moe": Family("qwen3_moe", EXPERTS, OF_EXPERTS, 0.0, MOE | {"num_experts": 4}),
    "glm4_moe": Family("glm4_moe", DENSE, OF_DENSE, 0.0, MOE | {"n_routed_experts": 4}),
}
COMMON = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip


def build_model(family: str, largest: float = 0.0) -> Any:
    """The model of a config; its first layer writes up to ``largest`` to the residual stream, where that is given."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    made = FAMILIES[family]
    torch.manual_seed(0)
    config = AutoConfig.for_model(made.kind, **{**COMMON, **made.settings})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    if largest:
        _grow(model, made, largest)
    return model


def build_data() -> list[dict[str, Any]]:
    """One batch of random tokens, for the model to learn by heart."""
    import torch

    tokens = torch.randint(3, 64, (4, 24), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": tokens, "labels": tokens}]


def _grow(model: Any, family: Family, largest: float) -> None:
    import torch

    weights = [model.get_parameter(f"{LAYER}.{name}") for name in family.grow]
    own = [weight.detach().clone() for weight in weights]
    written: list[float] = []
    hook = model.get_submodule(f"{LAYER}.{family.writer}").register_forward_hook(
        lambda module, given, output: written.append(float(output.abs().max()))
    )
    low, high = 1.0, 1e6
    with torch.no_grad():
        for _ in range(40):
            times = (low * high) ** 0.5
            for weight, before in zip(weights, own, strict=True):
                weight.copy_((before - family.zero) * times + family.zero)
            model(**build_data()[0])
            low, high = (low, times) if written[-1] > largest else (times, high)
    hook.remove()


@dataclass(frozen=True)
class Row:
    """What is said of one family, and what training it in FP16 came to without and with the pins that are named."""

    family: str
    level: str
    is_large: bool
    ready: Readiness
    trained: str
    is_right: bool

    @property
    def cells(self) -> tuple[str, ...]:
        pins = ", ".join(f"`{in_words(pin)}`" for pin in self.ready.pins)
        said = {True: pins or "nothing", False: "no pin that was tried helps", None: "open"}[self.ready.trains]
        works = f"{scale(self.ready.floor)} to {scale(self.ready.ceiling)}" if self.ready.trains else "-"
        stream = "large" if self.is_large else "as initialised"
        return (
            self.family,
            stream,
            multiple(self.ready.largest, 65504.0).removesuffix(" of"),
            works,
            said,
            self.trained,
        )


def row(config: Path, family: str, level: str, *, is_large: bool) -> Row:
    """Runs `ampdbg ranges` on a bfloat16 config, and `ampdbg scan` in FP16."""
    largest = LARGE if is_large else 0.0
    args = f"model.args={{family: {family}, largest: {largest}}}"
    common = (args, f"precision.level={level}")
    ready = ampdbg.ranges(config, overrides=common).readiness
    assert ready is not None, "the step is not finite in bfloat16"
    in_fp16 = (*common, "precision.dtype=float16", f"train.steps={STEPS}")
    plain = ampdbg.scan(config, overrides=in_fp16)
    trains = plain.verdict == "healthy"
    if not ready.pins:
        is_right = ready.trains is None or ready.trains is trains
        return Row(family, level, is_large, ready, "trains" if trains else "fails", is_right)
    pinned = ampdbg.scan(config, overrides=(*in_fp16, f"precision.pins={list(ready.pins)}"))
    cured = pinned.verdict == "healthy"
    trained = f"{'trains' if trains else 'fails'} without, {'trains' if cured else 'fails'} with"
    return Row(family, level, is_large, ready, trained, cured and not trains)


HEADINGS = ("family", "residual stream", "largest of 65,504", "loss scales", "to pin", "8 steps in FP16")
LEVELS = {
    "O1": "Autocast: the weights are float32",
    "O2": "Half weights with float32 masters",
}


def table(rows: list[Row]) -> Iterator[str]:
    """The lines of the page: a table for each level."""
    for level, title in LEVELS.items():
        yield from ("", f"### {title}", "", f"| {' | '.join(HEADINGS)} |", f"|{' --- |' * len(HEADINGS)}")
        yield from (f"| {' | '.join(one.cells)} |" for one in rows if one.level == level)
    yield ""


def main(families: list[str]) -> int:
    """Writes the page, or prints the rows of some families; 1 where training shows that one is wrong."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "config.yaml")
        target = Path(__file__).resolve().as_posix()
        config.write_text(
            f"model: {{target: '{target}:build_model'}}\ndata: {{target: '{target}:build_data'}}\n"
            "precision: {dtype: bfloat16}\ntrain: {device: cpu}\n",
            encoding="utf-8",
        )
        for level in LEVELS:
            for family in families or FAMILIES:
                for is_large in (False, True):
                    rows.append(row(config, family, level, is_large=is_large))
                    print("" if rows[-1].is_right else "WRONG:", level, *rows[-1].cells, sep=" | ", flush=True)
    if not families:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        made = "\n".join(table(rows))
        PAGE.write_text(f"{before}{BEGIN}{made}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    return int(not all(one.is_right for one in rows))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
