"""apex's SyncBatchNorm computes what torch's does."""

from torch.nn import SyncBatchNorm

__all__ = ["SyncBatchNorm"]
