"""Happens-before inside a cluster: vector clocks of lanes, warps and asynchronous copies."""
