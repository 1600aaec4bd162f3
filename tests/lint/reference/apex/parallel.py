"""apex's SyncBatchNorm computes the same as torch's."""

from torch.nn import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
