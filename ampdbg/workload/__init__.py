"""From a config to a live workload: a model, its optimizers, batches and losses (torch is imported here)."""

from __future__ import annotations

from ampdbg.workload.batches import tensor_leaves, to_device
from ampdbg.workload.build import Workload, build_workload

__all__ = ["Workload", "build_workload", "tensor_leaves", "to_device"]
