"""Models on devices: memory, replicas, placement and eviction."""
