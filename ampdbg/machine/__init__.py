"""The machine that ampdbg runs on: facts, collected without importing torch in this process, and judgments."""
