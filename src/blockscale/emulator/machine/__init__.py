"""The state of a cluster: warps, their registers, their memories and work in flight."""
