"""Who has written the gradients of an optimizer: told from a few of them by identity and version, without a sync."""

from __future__ import annotations

import torch

SAMPLE = 8
"""So many parameters of each optimizer are looked at. What they do not show is not blamed."""

Marks = tuple[tuple[int, int] | None, ...]


class GradientMarks:
    """The state of a sample of one optimizer's gradients when it was last noted."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._parameters = _sample(optimizer)
        self._noted = self.now()

    def now(self) -> Marks:
        """The identity and version of each gradient of the sample; None where there is none."""
        gradients = (parameter.grad for parameter in self._parameters)
        return tuple(None if gradient is None else (id(gradient), gradient._version) for gradient in gradients)

    def note(self) -> None:
        """From here on the gradients are those of now."""
        self._noted = self.now()

    def are_rewritten(self) -> bool:
        """Whether the gradients were cleared, or written by someone, since they were noted."""
        now = self.now()
        return now != self._noted or not any(now)


def _sample(optimizer: torch.optim.Optimizer) -> tuple[torch.Tensor, ...]:
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    return tuple(trained[:: max(1, -(-len(trained) // SAMPLE))])
