"""What kernels of several GPUs have in common: memory that all ranks reach, counters in it, and
copies."""
