"""The dtype of each op: CUDA's autocast op lists, their emulation on a CPU, precision levels and FP32 pins."""
