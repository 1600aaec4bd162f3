"""What a layer gives is transformed in half, as cuFFT does: the sum over a loud signal is beyond it."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.case import Case

CASE = Case(
    code="forward-overflow",
    verdict="precision",
    module="",
    op="aten._fft_r2c.default",
    step=0,
    phase="forward",
    says=("FP16's limit of 65,504",),
    twin=("model.args.gain=1.0",),
)


class Model(nn.Module):
    def __init__(self, gain: float = 1e4) -> None:
        super().__init__()
        self.gain = gain
        self.body = nn.Linear(4, 64)
        self.head = nn.Linear(85, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wave = (self.body(x) + 1) * self.gain
        window = torch.ones(16, device=wave.device, dtype=wave.dtype)
        spectrum = torch.stft(wave, 16, 16, window=window, center=False, return_complex=True)  # <- here
        magnitude = torch.view_as_real(spectrum).abs().float().flatten(1).log1p()
        return self.head(F.pad(magnitude, (0, 85 - magnitude.shape[1])))
