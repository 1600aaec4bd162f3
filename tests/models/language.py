"""Language models of transformers, built from a config as upstream initialises them, and batches to fine-tune them."""

from collections.abc import Callable, Mapping
from typing import Any

import tests.models.torchvision_on_cpu  # noqa: F401 - transformers imports torchvision where it is there

# isort: split
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

Growth = Mapping[str, tuple[float, int]]
"""Outliers as training grows them, by the weight's name: the factor, and how many of its first output features grow."""

VOCABULARY = 512
WIDTH = 64
IGNORED = -100
"""The label that transformers' losses leave out."""


def factory(
    config: Callable[..., Any], model: Callable[..., PreTrainedModel], **shape: Any
) -> Callable[..., nn.Module]:
    """Makes models of this shape but for changes, with outliers, and each block checkpointed where asked for."""

    def made(grow: Growth | None = None, checkpointing: bool = False, **changes: Any) -> nn.Module:
        whole = model(config(**{**shape, **changes}))
        if checkpointing:
            # Its later name, activation_checkpointing_enable, is not in the last transformers for Python 3.10.
            whole.gradient_checkpointing_enable()
        return grown(whole, grow)

    return made


def grown(model: nn.Module, growth: Growth | None) -> nn.Module:
    """Multiplies the first output features of each named weight in place and returns the model."""
    with torch.no_grad():
        for name, (factor, count) in (growth or {}).items():
            weight, owner = model.get_parameter(name), model.get_submodule(name.rpartition(".")[0])
            # transformers' Conv1D, unlike nn.Linear, has its output features last.
            features = weight.T if type(owner).__name__ == "Conv1D" else weight
            features[:count] *= factor
    return model


SHAPE = {"hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": 4}
DECODER = {**SHAPE, "intermediate_size": 128, "vocab_size": VOCABULARY, "max_position_embeddings": 64}

T5_SIZES = {"d_model": WIDTH, "d_kv": 16, "d_ff": 128, "num_layers": 3, "num_heads": 4, "vocab_size": VOCABULARY}
T5_1_1 = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "decoder_start_token_id": 0}
t5 = factory(T5Config, T5ForConditionalGeneration, **T5_SIZES, **T5_1_1)
"""T5 1.1 (gated GELU, untied head); ``feed_forward_proj="relu", tie_word_embeddings=True`` is the first T5."""
GPT2_SIZES = {"n_embd": WIDTH, "n_layer": 3, "n_head": 4, "n_positions": 64, "vocab_size": VOCABULARY}
gpt2 = factory(GPT2Config, GPT2LMHeadModel, **GPT2_SIZES)
"""GPT-2 with tied embeddings."""
MULTI_QUERY = {"num_key_value_heads": 1, "head_dim": 16, "hidden_activation": "gelu_pytorch_tanh"}
gemma = factory(GemmaConfig, GemmaForCausalLM, **DECODER, **MULTI_QUERY)
"""Gemma: multi-query attention, gated GELU, embeddings multiplied by the root of the width."""
llama = factory(LlamaConfig, LlamaForCausalLM, **DECODER, num_key_value_heads=2)
"""Llama: grouped queries, SwiGLU, untied head."""
OPT_SIZES = {"ffn_dim": 128, "vocab_size": VOCABULARY, "word_embed_proj_dim": WIDTH, "max_position_embeddings": 64}
opt = factory(OPTConfig, OPTForCausalLM, **SHAPE, **OPT_SIZES)
"""OPT: ReLU, norms before each block; ``do_layer_norm_before=False`` is the 350m layout."""
bert = factory(BertConfig, BertForMaskedLM, **DECODER)
bert_of_classes = factory(BertConfig, BertForSequenceClassification, **DECODER)


def texts(count: int = 3, size: int = 4, length: int = 24, padding: str = "right") -> list[dict[str, torch.Tensor]]:
    """Texts of unlike lengths with a mask over the padding; the labels of padded places are ignored."""
    made = []
    for _ in range(count):
        tokens, mask = _padded(size, length, padding)
        made.append({"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, IGNORED)})
    return made


def text_pairs(count: int = 3, size: int = 4, length: int = 24) -> list[dict[str, torch.Tensor]]:
    """Source texts with padding, and shorter target texts whose padding is ignored."""
    made = []
    for _ in range(count):
        (tokens, mask), (target, target_mask) = _padded(size, length), _padded(size, length // 2)
        labels = target.masked_fill(target_mask == 0, IGNORED)
        made.append({"input_ids": tokens, "attention_mask": mask, "labels": labels})
    return made


def masked_texts(count: int = 3, size: int = 4, length: int = 24) -> list[dict[str, torch.Tensor]]:
    """Texts of two segments in which 15 % of the tokens are hidden; only these have labels."""
    made = []
    for batch in texts(count, size, length):
        hidden = (torch.rand(size, length) < 0.15) & (batch["attention_mask"] == 1)
        hidden[:, 0] = True  # a batch without any label has a NaN loss in every precision
        segments = (torch.arange(length) >= length // 2).long().expand(size, length)
        labels = batch["input_ids"].masked_fill(~hidden, IGNORED)
        tokens = batch["input_ids"].masked_fill(hidden, 1)
        made.append({**batch, "input_ids": tokens, "token_type_ids": segments, "labels": labels})
    return made


def labelled_texts(count: int = 3, size: int = 4, length: int = 24, classes: int = 2) -> list[dict[str, torch.Tensor]]:
    """Texts with a class each."""
    return [{**batch, "labels": torch.randint(classes, (size,))} for batch in texts(count, size, length)]


def _padded(size: int, length: int, padding: str = "right") -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens above the special ones and their mask; the first text fills its row."""
    lengths = torch.randint(length // 2, length + 1, (size,))
    lengths[0] = length
    mask = (torch.arange(length) < lengths[:, None]).long()
    mask = mask.flip(1) if padding == "left" else mask
    return torch.randint(3, VOCABULARY, (size, length)).masked_fill(mask == 0, 0), mask
