"""The page at `/`: what the system does, what is not well, and what mends it."""
