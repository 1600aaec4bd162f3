"""Build a live workload from a config: a model, its optimizers, batches and losses (this package imports torch)."""
