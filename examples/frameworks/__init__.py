"""The same in PyTorch and in JAX."""
