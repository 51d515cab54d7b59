"""What layers of experts need beside quantizers and products, by kernels written in CuTe DSL."""
