"""What may be committed: offsets that are done, in order and beyond the first gap."""
