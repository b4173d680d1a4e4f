"""Processes for work that hostile input can make endless or deadly: limited by the kernel, ended when late."""
