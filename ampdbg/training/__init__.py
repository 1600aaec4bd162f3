"""The watched training loop, and its FP32 twin for comparison."""
