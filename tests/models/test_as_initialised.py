"""No wolf is cried: real models as upstream initialises them are healthy, whatever they are run with."""

from pathlib import Path

import pytest

from ampdbg.commands.scan import exit_code
from ampdbg.record.run import Record
from tests.models.runs import LANGUAGE, SIGHT_AND_SOUND, Workload, scanned
from tests.siblings import slow_except

FIRST_T5 = {"feed_forward_proj": "relu", "tie_word_embeddings": True}
EAGER = {"attn_implementation": "eager"}
SDPA = {"attn_implementation": "sdpa"}
CHECKPOINTED = {"checkpointing": True}
LEFT = {"padding": "left"}
CROSS_ENTROPY = "torch.nn.functional:cross_entropy"

TRANSFORMERS = (
    Workload(LANGUAGE, "t5", "text_pairs"),
    Workload(LANGUAGE, "t5", "text_pairs", {**FIRST_T5, **CHECKPOINTED}),
    Workload(LANGUAGE, "gpt2", "texts", EAGER),
    Workload(LANGUAGE, "gpt2", "texts", SDPA, LEFT),
    Workload(LANGUAGE, "gpt2", "texts", {**EAGER, **CHECKPOINTED, "reorder_and_upcast_attn": True}),
    Workload(LANGUAGE, "gemma", "texts"),
    Workload(LANGUAGE, "gemma", "texts", EAGER, LEFT),
    Workload(LANGUAGE, "llama", "texts", CHECKPOINTED),
    Workload(LANGUAGE, "opt", "texts"),
    Workload(LANGUAGE, "opt", "texts", {**EAGER, "do_layer_norm_before": False}, LEFT),
    Workload(LANGUAGE, "bert", "masked_texts", EAGER),
    Workload(LANGUAGE, "bert", "masked_texts", CHECKPOINTED),
    Workload(LANGUAGE, "bert_of_classes", "labelled_texts", {"num_labels": 2}),
    Workload(SIGHT_AND_SOUND, "vit", "pictures"),
    Workload(SIGHT_AND_SOUND, "vit", "pictures", EAGER),
    Workload(SIGHT_AND_SOUND, "whisper", "recordings"),
    Workload(SIGHT_AND_SOUND, "whisper", "recordings", {**EAGER, **CHECKPOINTED}),
)


def pictured(name: str, **args: object) -> Workload:
    return Workload(SIGHT_AND_SOUND, "timm_model", "picture_pairs", {"name": name, **args}, loss=CROSS_ENTROPY)


TIMM = (
    pictured("resnet18"),
    pictured("convnext_atto"),
    pictured("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=4),
    # Its batch norms see one pixel of four pictures: the scale has to fall from 65536 to 512 before a step works.
    pictured("mobilenetv3_small_100"),
)

LONG = {"length": 128, "size": 2}

AT_FULL_WIDTH = (
    Workload(LANGUAGE, "t5", "text_pairs", {"d_model": 512, "d_kv": 64, "d_ff": 1024, "num_heads": 6}, LONG),
    Workload(LANGUAGE, "gpt2", "texts", {**EAGER, "n_embd": 768, "n_head": 12, "n_positions": 128}, LONG),
    Workload(LANGUAGE, "gemma", "texts", {"hidden_size": 2048, "head_dim": 256, "intermediate_size": 4096}, LONG),
    Workload(SIGHT_AND_SOUND, "vit", "pictures", {"hidden_size": 768, "num_attention_heads": 12, "patch_size": 4}),
)

AT_ONCE = ("train.accumulate=2", "train.clip_grad_norm=1.0", "precision.loss_scale.growth_interval=3")
RUNS_OTHERWISE = (
    AT_ONCE,
    ("train.accumulate=2", "train.clip_grad_norm=1.0"),
    ("precision.loss_scale.growth_interval=3",),
    ("optimizer.args.lr=3.0e-3",),
    ("precision.level=O0",),
    ("precision.dtype=bfloat16",),
)
QUICK = (AT_ONCE, ("precision.dtype=bfloat16",))


def assert_unblamed(record: Record) -> None:
    assert [finding for finding in record.findings if finding.code != "scale-calibration"] == []
    assert exit_code(record, "warning") == 0


def assert_healthy(record: Record) -> None:
    assert_unblamed(record)
    assert record.verdict == "healthy"


@pytest.mark.parametrize("workload", slow_except((TRANSFORMERS[2],), (*TRANSFORMERS, *TIMM, *AT_FULL_WIDTH)), ids=str)
def test_a_model_is_healthy(workload: Workload, tmp_path: Path) -> None:
    assert_healthy(scanned(workload, tmp_path, 8 if workload in AT_FULL_WIDTH else 10))


@pytest.mark.parametrize("overrides", slow_except(QUICK, RUNS_OTHERWISE), ids=" ".join)
@pytest.mark.parametrize(
    "workload", slow_except((TRANSFORMERS[2],), [TRANSFORMERS[number] for number in (0, 2, 15)]), ids=str
)
def test_a_model_is_healthy_in_other_kinds_of_run(
    workload: Workload, overrides: tuple[str, ...], tmp_path: Path
) -> None:
    assert_healthy(scanned(workload, tmp_path, 6, *overrides))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_run_that_ends_while_the_scale_settles_is_not_blamed(seed: int, tmp_path: Path) -> None:
    record = scanned(TRANSFORMERS[0], tmp_path, 1, seed=seed)
    assert record.steps[-1].skipped
    assert_unblamed(record)
    assert record.verdict == "inconclusive"  # no step was taken: nothing is shown of a training
