"""What is watched while a training step runs: gradients, the scaler, batches, parameters and buffers."""
