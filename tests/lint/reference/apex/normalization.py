"""apex's FusedLayerNorm computes what torch's LayerNorm does."""

from torch.nn import LayerNorm as FusedLayerNorm

__all__ = ["FusedLayerNorm"]
