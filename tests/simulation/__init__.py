"""The whole simulated from one seed: real flows of several workers in a made-up world of faults. docs/simulation.md."""
