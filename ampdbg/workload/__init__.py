"""From a config to a live workload: a model, its optimizers, batches and losses (torch is imported here)."""
