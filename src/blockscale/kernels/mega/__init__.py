"""What a mega MoE's ranks share on any architecture: memory, signals, the order of work, and how
tokens travel. One persistent kernel does all of it, beside the products."""
