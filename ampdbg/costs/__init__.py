"""What a step costs: the memory that it holds, its FLOPs, its time; and the levels of precision side by side."""
