"""All requests of a worker: their states, what each holds, whether one may start, and what is said of it meanwhile."""
