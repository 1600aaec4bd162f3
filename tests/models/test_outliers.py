"""Real models with outliers as training grows them: the op that overflows is named, with its module and line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.models.runs import LANGUAGE, SIGHT_AND_SOUND, Workload, scanned
from tests.models.test_as_initialised import CHECKPOINTED, EAGER, FIRST_T5, assert_healthy, pictured

if TYPE_CHECKING:
    from tests.models.language import Growth  # and transformers, which takes seconds

WIDTH = 64
FEW = 4
"""So many output features are outliers."""

SCORES = "attn_weights = torch.matmul(query, key.transpose(2, 3)) * scaling"
GATED = "down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))"
WO, FC2, DENSE = (f"hidden_states = self.{name}(hidden_states)" for name in ("wo", "fc2", "dense"))


@dataclass(frozen=True)
class Overflow:
    """Outliers planted in a model, and where FP16 must be found to overflow; ``home`` is the model's own file."""

    workload: Workload
    growth: Growth
    module: str
    op: str
    text: str
    home: str = ""

    @property
    def file(self) -> str:
        name = self.workload.model
        return self.home or f"models/{name}/modeling_{name}.py"


def layers(home: str, inner: str, outer: str, factor: float, count: int = FEW) -> Growth:
    return {f"{home}.{inner}.weight": (factor, count), f"{home}.{outer}.weight": (factor, count)}


def language(model: str, data: str = "texts", args: Mapping[str, Any] | None = None) -> Workload:
    return Workload(LANGUAGE, model, data, args or {})


T5, T5_DECODER = "encoder.block.1.layer.1.DenseReluDense", "decoder.block.1.layer.2.DenseReluDense"
T5_ATTENTION = "encoder.block.1.layer.0.SelfAttention"
BERT, WHISPER = "bert.encoder.layer.1", Workload(SIGHT_AND_SOUND, "whisper", "recordings")
CAST, MM, ADDMM, BMM = "aten._to_copy.default", "aten.mm.default", "aten.addmm.default", "aten.bmm.default"
MUL, CONVOLUTION = "aten.mul.Tensor", "aten.convolution.default"

OVERFLOWS = {
    # What upstream keeps in float32 since transformers#20287: the product of gate and value overflows as it is cast.
    "t5": Overflow(language("t5", "text_pairs"), layers(T5, "wi_0", "wi_1", 300), f"{T5}.wo", CAST, WO),
    "t5 decoder, checkpointed": Overflow(
        language("t5", "text_pairs", CHECKPOINTED),
        layers(T5_DECODER, "wi_0", "wi_1", 300),
        f"{T5_DECODER}.wo",
        CAST,
        WO,
    ),
    "first t5": Overflow(language("t5", "text_pairs", FIRST_T5), layers(T5, "wi", "wo", 1000), f"{T5}.wo", MM, WO),
    "t5 queries and keys": Overflow(
        language("t5", "text_pairs", EAGER), layers(T5_ATTENTION, "q", "k", 300, WIDTH), T5_ATTENTION, BMM, SCORES
    ),
    # The first two thirds of c_attn's output features are the queries and the keys.
    "gpt2 queries and keys": Overflow(
        language("gpt2", "texts", EAGER),
        {"transformer.h.1.attn.c_attn.weight": (1000, 2 * WIDTH)},
        "transformer.h.1.attn",
        BMM,
        "attn_weights = torch.matmul(query, key.transpose(-1, -2)) * scaling",
    ),
    "gemma": Overflow(
        language("gemma"), layers("model.layers.1.mlp", "gate_proj", "up_proj", 2000), "model.layers.1.mlp", MUL, GATED
    ),
    "llama, checkpointed": Overflow(
        language("llama", "texts", CHECKPOINTED),
        layers("model.layers.1.mlp", "gate_proj", "up_proj", 2000),
        "model.layers.1.mlp",
        MUL,
        GATED,
    ),
    "opt": Overflow(
        language("opt"), layers("model.decoder.layers.1", "fc1", "fc2", 5000), "model.decoder.layers.1.fc2", ADDMM, FC2
    ),
    "bert": Overflow(
        language("bert", "masked_texts"),
        layers(BERT, "intermediate.dense", "output.dense", 5000),
        f"{BERT}.output.dense",
        ADDMM,
        DENSE,
    ),
    "bert queries and keys": Overflow(
        language("bert", "masked_texts", EAGER),
        layers(f"{BERT}.attention.self", "query", "key", 1000, WIDTH),
        f"{BERT}.attention.self",
        BMM,
        SCORES,
    ),
    "vit": Overflow(
        Workload(SIGHT_AND_SOUND, "vit", "pictures"),
        layers("vit.layers.1.mlp", "fc1", "fc2", 4000),
        "vit.layers.1.mlp.fc2",
        ADDMM,
        FC2,
    ),
    "whisper encoder": Overflow(
        WHISPER, layers("model.encoder.layers.1", "fc1", "fc2", 5000), "model.encoder.layers.1.fc2", ADDMM, FC2
    ),
    "whisper convolutions": Overflow(
        WHISPER,
        layers("model.encoder", "conv1", "conv2", 5000),
        "model.encoder.conv2",
        CONVOLUTION,
        "inputs_embeds = nn.functional.gelu(self.conv2(inputs_embeds))",
    ),
    "convnext of timm": Overflow(
        pictured("convnext_atto"),
        layers("stages.1.blocks.1.mlp", "fc1", "fc2", 5000),
        "stages.1.blocks.1.mlp.fc2",
        CONVOLUTION,
        "x = self.fc2(x)",
        "timm/layers/mlp.py",
    ),
    # Both addends of the residual are finite, and so is every child of the block.
    "residual of a resnet of timm": Overflow(
        pictured("resnet18", zero_init_last=False),
        layers("layer1", "0.bn2", "1.bn2", 1.6e4),
        "layer1.1",
        "aten.add_.Tensor",
        "x += shortcut",
        "timm/models/resnet.py",
    ),
}


QUICK = ("gpt2 queries and keys", "whisper convolutions")
"""A product and a convolution; the others take the same way, and are slow."""

EACH = [
    pytest.param(overflow, id=name, marks=() if name in QUICK else pytest.mark.slow)
    for name, overflow in OVERFLOWS.items()
]


def planted(overflow: Overflow, share: float = 1.0, **changes: Any) -> Workload:
    """The workload with its outliers, or with a share of them; ``changes`` are to the model's arguments."""
    growth = {name: [factor * share, count] for name, (factor, count) in overflow.growth.items()}
    return replace(overflow.workload, args={**overflow.workload.args, "grow": growth, **changes})


@pytest.mark.slow
@pytest.mark.parametrize("overflow", EACH)
def test_outliers_are_found_where_they_overflow(overflow: Overflow, tmp_path: Path) -> None:
    record = scanned(planted(overflow), tmp_path, 3)
    assert record.verdict == "precision"
    root = record.findings[0]
    assert (root.code, root.step, root.phase) == ("forward-overflow", 0, "forward")
    assert (root.module, root.op) == (overflow.module, overflow.op)
    assert root.source is not None
    assert Path(root.source.file).as_posix().endswith(overflow.file)
    assert root.source.text == overflow.text
    lines = Path(root.source.file).read_text(encoding="utf-8").splitlines()
    assert lines[root.source.line - 1].strip() == overflow.text
    assert isinstance(root.evidence["value"], float)
    assert root.evidence["value"] > 65504


@pytest.mark.parametrize("overflow", EACH)
def test_outliers_that_fp16_can_hold_are_healthy(overflow: Overflow, tmp_path: Path) -> None:
    assert_healthy(scanned(planted(overflow, share=0.1), tmp_path, 10))


def test_a_fused_attention_holds_the_queries_and_keys_that_overflow_an_eager_one(tmp_path: Path) -> None:
    fused = planted(OVERFLOWS["gpt2 queries and keys"], attn_implementation="sdpa")
    assert_healthy(scanned(fused, tmp_path, 3))
