"""One request: its states, its arrival, its attempts, and what is said of it while it runs."""
