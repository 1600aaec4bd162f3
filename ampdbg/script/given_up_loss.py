"""A loss that is not finite, and that the loop may have given up."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from ampdbg.probes.seams import Seam, attached


class GivenUpLoss:
    """A loss that is not finite, behind which a module is called again: the loop has given it up and begins anew, or
    makes another part of the same loss. The next backward pass tells.

    Args:
        loss: it, of one element.
        passed: called behind that.
    """

    def __init__(self, loss: torch.Tensor, passed: Callable[[], None]) -> None:
        self.loss = float(loss.detach())
        self._tensor = weakref.ref(loss)
        self._is_part = False
        self._leaving = ExitStack()
        self._leaving.callback(loss.register_hook(self._led_to).remove)

        def around(seam: Seam, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if seam == "engine" and kwargs.get("accumulate_grad", True) and torch._C._current_graph_task_id() == -1:
                passed()
            return result

        self._leaving.enter_context(attached(around))

    def _led_to(self, gradient: torch.Tensor) -> None:
        self._is_part = True

    def is_of(self, loss: torch.Tensor) -> bool:
        """Whether it is this very loss."""
        return self._tensor() is loss

    def ended_in_a_backward_pass(self) -> bool:
        """Whether it went backward; torch is as it was from here on."""
        self._leaving.close()
        return self._is_part
