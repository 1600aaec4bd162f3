"""LoFTR's backbone, linear attention and coarse matching on pairs of 256 x 256 images; its issues 188 and 285."""

import torch
from src.loftr.backbone import build_backbone
from src.loftr.loftr_module import LocalFeatureTransformer
from src.loftr.utils.coarse_matching import CoarseMatching
from src.loftr.utils.cvpr_ds_config import default_cfg
from src.loftr.utils.position_encoding import PositionEncodingSine
from torch import nn

Batch = tuple[torch.Tensor, torch.Tensor]
SIZE = 256


class Coarse(nn.Module):
    """LoFTR up to its matrix of coarse matches, which its coarse loss is taken from."""

    def __init__(self) -> None:
        super().__init__()
        config = dict(default_cfg)
        config["resnetfpn"] = {"initial_dim": 16, "block_dims": [16, 24, 64]}
        config["coarse"] = {
            **default_cfg["coarse"],
            "d_model": 64,
            "d_ffn": 64,
            "nhead": 2,
            "layer_names": ["self", "cross"],
        }
        self.backbone = build_backbone(config)
        self.pos_encoding = PositionEncodingSine(64, temp_bug_fix=True)
        self.loftr_coarse = LocalFeatureTransformer(config["coarse"])
        self.coarse_matching = CoarseMatching(config["match_coarse"])

    def forward(self, image0: torch.Tensor, image1: torch.Tensor) -> torch.Tensor:
        (coarse0, _), (coarse1, _) = self.backbone(image0), self.backbone(image1)
        rows0, rows1 = (self.pos_encoding(coarse).flatten(2).transpose(1, 2) for coarse in (coarse0, coarse1))
        rows0, rows1 = self.loftr_coarse(rows0, rows1)
        none = torch.zeros(1, dtype=torch.long)
        data = {"hw0_c": coarse0.shape[2:], "hw1_c": coarse1.shape[2:], "hw0_i": image0.shape[2:]}
        data.update(spv_b_ids=none, spv_i_ids=none, spv_j_ids=none)
        self.coarse_matching(rows0, rows1, data)
        return data["conf_matrix"]


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return Coarse()


def build_data() -> list[Batch]:
    torch.manual_seed(1)
    images = [torch.rand(1, 1, SIZE, SIZE) for _ in range(3)]
    return [(image, image.roll(8, dims=-1)) for image in images]


def step(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The focal loss of src/losses/loftr_loss.py over the matches that a shift by one cell makes."""
    conf = model(*batch).clamp(1e-6, 1 - 1e-6)
    cells = SIZE // 8
    matches = torch.zeros(cells * cells, cells * cells)
    index = torch.arange(cells * cells)
    matches[index, index // cells * cells + (index % cells + 1) % cells] = 1
    positive = -0.25 * (1 - conf) ** 2 * conf.log()
    negative = -0.25 * conf**2 * (1 - conf).log()
    return positive[0, matches == 1].mean() + negative[0, matches == 0].mean()
