"""Real models with outliers as training grows them: the op that overflows is named, with its module and line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.models.outliers import Growth
from tests.models.runs import LANGUAGE, SIGHT_AND_SOUND, Workload, scanned
from tests.models.test_as_initialised import CHECKPOINTED, EAGER, FIRST_T5, assert_healthy, pictured

WIDTH = 64
FEW = 4
"""So many output features are outliers."""

GATED_FEED_FORWARD = "encoder.block.1.layer.1.DenseReluDense"
DECODERS_FEED_FORWARD = "decoder.block.1.layer.2.DenseReluDense"
GATED_PRODUCT = "down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))"


@dataclass(frozen=True)
class Overflow:
    """Outliers planted in a model, and where FP16 must be found to overflow."""

    workload: Workload
    growth: Growth
    module: str
    op: str
    file: str
    text: str


def layers(inner: str, outer: str, factor: float, count: int = FEW) -> Growth:
    return {f"{inner}.weight": (factor, count), f"{outer}.weight": (factor, count)}


def language(model: str, data: str = "texts", args: Mapping[str, Any] | None = None) -> Workload:
    return Workload(LANGUAGE, model, data, args or {})


OVERFLOWS = {
    # What upstream keeps in float32 since transformers#20287: the product of gate and value overflows as it is cast.
    "t5": Overflow(
        language("t5", "text_pairs"),
        layers(f"{GATED_FEED_FORWARD}.wi_0", f"{GATED_FEED_FORWARD}.wi_1", 300),
        f"{GATED_FEED_FORWARD}.wo",
        "aten._to_copy.default",
        "models/t5/modeling_t5.py",
        "hidden_states = self.wo(hidden_states)",
    ),
    "t5 decoder, checkpointed": Overflow(
        language("t5", "text_pairs", CHECKPOINTED),
        layers(f"{DECODERS_FEED_FORWARD}.wi_0", f"{DECODERS_FEED_FORWARD}.wi_1", 300),
        f"{DECODERS_FEED_FORWARD}.wo",
        "aten._to_copy.default",
        "models/t5/modeling_t5.py",
        "hidden_states = self.wo(hidden_states)",
    ),
    "first t5": Overflow(
        language("t5", "text_pairs", FIRST_T5),
        layers(f"{GATED_FEED_FORWARD}.wi", f"{GATED_FEED_FORWARD}.wo", 1000),
        f"{GATED_FEED_FORWARD}.wo",
        "aten.mm.default",
        "models/t5/modeling_t5.py",
        "hidden_states = self.wo(hidden_states)",
    ),
    "t5 queries and keys": Overflow(
        language("t5", "text_pairs", EAGER),
        layers("encoder.block.1.layer.0.SelfAttention.q", "encoder.block.1.layer.0.SelfAttention.k", 300, WIDTH),
        "encoder.block.1.layer.0.SelfAttention",
        "aten.bmm.default",
        "models/t5/modeling_t5.py",
        "attn_weights = torch.matmul(query, key.transpose(2, 3)) * scaling",
    ),
    # The first two thirds of c_attn's output features are the queries and the keys.
    "gpt2 queries and keys": Overflow(
        language("gpt2", "texts", EAGER),
        {"transformer.h.1.attn.c_attn.weight": (1000, 2 * WIDTH)},
        "transformer.h.1.attn",
        "aten.bmm.default",
        "models/gpt2/modeling_gpt2.py",
        "attn_weights = torch.matmul(query, key.transpose(-1, -2)) * scaling",
    ),
    "gemma": Overflow(
        language("gemma"),
        layers("model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj", 2000),
        "model.layers.1.mlp",
        "aten.mul.Tensor",
        "models/gemma/modeling_gemma.py",
        GATED_PRODUCT,
    ),
    "llama, checkpointed": Overflow(
        language("llama", "texts", CHECKPOINTED),
        layers("model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj", 2000),
        "model.layers.1.mlp",
        "aten.mul.Tensor",
        "models/llama/modeling_llama.py",
        GATED_PRODUCT,
    ),
    "opt": Overflow(
        language("opt"),
        layers("model.decoder.layers.1.fc1", "model.decoder.layers.1.fc2", 5000),
        "model.decoder.layers.1.fc2",
        "aten.addmm.default",
        "models/opt/modeling_opt.py",
        "hidden_states = self.fc2(hidden_states)",
    ),
    "bert": Overflow(
        language("bert", "masked_texts"),
        layers("bert.encoder.layer.1.intermediate.dense", "bert.encoder.layer.1.output.dense", 5000),
        "bert.encoder.layer.1.output.dense",
        "aten.addmm.default",
        "models/bert/modeling_bert.py",
        "hidden_states = self.dense(hidden_states)",
    ),
    "bert queries and keys": Overflow(
        language("bert", "masked_texts", EAGER),
        layers("bert.encoder.layer.1.attention.self.query", "bert.encoder.layer.1.attention.self.key", 1000, WIDTH),
        "bert.encoder.layer.1.attention.self",
        "aten.bmm.default",
        "models/bert/modeling_bert.py",
        "attn_weights = torch.matmul(query, key.transpose(2, 3)) * scaling",
    ),
    "vit": Overflow(
        Workload(SIGHT_AND_SOUND, "vit", "pictures"),
        layers("vit.layers.1.mlp.fc1", "vit.layers.1.mlp.fc2", 4000),
        "vit.layers.1.mlp.fc2",
        "aten.addmm.default",
        "models/vit/modeling_vit.py",
        "hidden_states = self.fc2(hidden_states)",
    ),
    "whisper encoder": Overflow(
        Workload(SIGHT_AND_SOUND, "whisper", "recordings"),
        layers("model.encoder.layers.1.fc1", "model.encoder.layers.1.fc2", 5000),
        "model.encoder.layers.1.fc2",
        "aten.addmm.default",
        "models/whisper/modeling_whisper.py",
        "hidden_states = self.fc2(hidden_states)",
    ),
    "whisper convolutions": Overflow(
        Workload(SIGHT_AND_SOUND, "whisper", "recordings"),
        layers("model.encoder.conv1", "model.encoder.conv2", 5000),
        "model.encoder.conv2",
        "aten.convolution.default",
        "models/whisper/modeling_whisper.py",
        "inputs_embeds = nn.functional.gelu(self.conv2(inputs_embeds))",
    ),
    "convnext of timm": Overflow(
        pictured("convnext_atto"),
        layers("stages.1.blocks.1.mlp.fc1", "stages.1.blocks.1.mlp.fc2", 5000),
        "stages.1.blocks.1.mlp.fc2",
        "aten.convolution.default",
        "timm/layers/mlp.py",
        "x = self.fc2(x)",
    ),
    # Both addends of the residual are finite, and so is every child of the block.
    "residual of a resnet of timm": Overflow(
        pictured("resnet18", zero_init_last=False),
        layers("layer1.0.bn2", "layer1.1.bn2", 1.6e4),
        "layer1.1",
        "aten.add_.Tensor",
        "timm/models/resnet.py",
        "x += shortcut",
    ),
}


QUICK = ("gpt2 queries and keys", "llama, checkpointed", "whisper convolutions")
"""One of each kind of overflow; the others take the same way, and are slow."""

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
    assert (
        Path(root.source.file).read_text(encoding="utf-8").splitlines()[root.source.line - 1].strip() == overflow.text
    )
    assert isinstance(root.evidence["value"], float)
    assert root.evidence["value"] > 65504


@pytest.mark.parametrize("overflow", EACH)
def test_outliers_that_fp16_can_hold_are_healthy(overflow: Overflow, tmp_path: Path) -> None:
    assert_healthy(scanned(planted(overflow, share=0.1), tmp_path, 10))


def test_a_fused_attention_holds_the_queries_and_keys_that_overflow_an_eager_one(tmp_path: Path) -> None:
    fused = planted(OVERFLOWS["gpt2 queries and keys"], attn_implementation="sdpa")
    assert_healthy(scanned(fused, tmp_path, 3))
