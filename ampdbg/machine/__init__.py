"""The machine that ampdbg runs on: facts, asked without torch in this process, and what they mean."""
