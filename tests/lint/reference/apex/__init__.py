"""A stand-in for apex in FP32 (its O0): what scripts that use apex are compared with, where apex cannot be had."""

from . import amp, fp16_utils, multi_tensor_apply, normalization, optimizers, parallel

__all__ = ["amp", "fp16_utils", "multi_tensor_apply", "normalization", "optimizers", "parallel"]
