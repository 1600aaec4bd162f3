"""VICReg with its gather over processes, of which there is one, and its covariance loss."""

import tempfile
from argparse import Namespace
from typing import Any

import torch
import torch.distributed as dist
import torchvision_on_cpu  # noqa: F401
from main_vicreg import VICReg
from torch import nn


def build_model() -> nn.Module:
    torch.manual_seed(0)
    if not dist.is_initialized():
        dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
    coefficients: dict[str, Any] = {"sim_coeff": 25.0, "std_coeff": 25.0, "cov_coeff": 1.0}
    return VICReg(Namespace(mlp="128-128-128", arch="resnet34", batch_size=8, **coefficients))


def build_data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    views = [torch.randn(8, 3, 32, 32) for _ in range(3)]
    return [(view, view.flip(-1) + 0.1 * torch.randn_like(view)) for view in views]


def step(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return model(*batch)
