"""The command `penstock`, the embedded broker and the supervisor that runs everything on one machine."""
