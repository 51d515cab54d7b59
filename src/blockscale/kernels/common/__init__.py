"""Parts that kernels for several architectures are made of."""
