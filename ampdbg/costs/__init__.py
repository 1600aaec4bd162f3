"""The cost of a step: memory, FLOPs and time, and a comparison of the precision levels."""
