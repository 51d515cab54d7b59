"""Fast kernels. Each equals the reference byte for byte, and none imports it."""
