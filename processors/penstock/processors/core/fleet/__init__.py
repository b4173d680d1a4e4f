"""Devices and models: memory, estimates, replicas, and the pure decisions of placement and eviction."""
