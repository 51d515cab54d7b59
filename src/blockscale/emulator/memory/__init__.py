"""Global memory, and the tensor maps through which TMA reaches it."""
