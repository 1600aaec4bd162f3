"""Probes that watch a running training step: gradients, the scaler, batches, parameters and buffers."""
