"""Half the memory, of vision transformers: what O1 keeps against FP32, exact to the byte against plain hooks."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from ampdbg.config.file import load_config
from ampdbg.costs.step import PassUse
from ampdbg.replay.run import prepared
from tests.commands.program import ROOT
from tests.costs.counting import counted, used
from tests.models.runs import SIGHT_AND_SOUND


def exact(config: Path, level: str) -> PassUse:
    with prepared(load_config(config, (f"precision.level={level}", "train.device=cpu"))) as run:
        use = used(run)
        assert use.activations + use.casts == counted(run)
        return use


def timm_vit(folder: Path) -> Path:
    shape = {"img_size": 32, "patch_size": 4, "depth": 4}
    config = {
        "model": {"target": f"{SIGHT_AND_SOUND}:timm_model", "args": {"name": "vit_tiny_patch16_224", **shape}},
        "data": {"target": f"{SIGHT_AND_SOUND}:picture_pairs"},
        "loss": {"target": "torch.nn.functional:cross_entropy"},
    }
    (folder / "c.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return folder / "c.yaml"


@pytest.mark.slow
def test_o1_keeps_at_most_six_tenths_of_what_fp32_keeps_of_a_timm_vit(tmp_path: Path) -> None:
    fp32, o1 = (exact(timm_vit(tmp_path), level) for level in ("O0", "O1"))
    assert 0.5 < o1.activations / fp32.activations <= 0.6
    assert o1.flops["float16"] == sum(fp32.flops.values())


def test_what_the_example_keeps_is_exact(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    kept = {level: exact(ROOT / "configs" / "vit.yaml", level) for level in ("O0", "O1", "O2")}
    # Attention takes a share here that autocast does not halve: the softmax in FP32, and its copy in half beside it.
    assert [use.activations for use in kept.values()] == [5_206_532, 3_418_244, 2_604_036]
    assert [use.casts for use in kept.values()] == [0, 173_312, 0]
