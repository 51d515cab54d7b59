"""Models over ranks: sharded parameters, layers and sequences, gathered quantized."""
