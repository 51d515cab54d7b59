"""Races in global memory between clusters, launches and ranks (PTX ISA, section 8)."""
