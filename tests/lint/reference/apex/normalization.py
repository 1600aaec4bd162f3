"""apex's FusedLayerNorm computes the same as torch's LayerNorm."""

from torch.nn import LayerNorm as FusedLayerNorm

__all__ = ["FusedLayerNorm"]
