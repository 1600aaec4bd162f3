"""Which dtype each op runs in: CUDA's op lists, their emulation on a CPU, precision levels and pins."""
