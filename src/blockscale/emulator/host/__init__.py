"""Host code on a CPU: CuTe DSL's, nvcc's, and what any asks of the CUDA runtime."""
