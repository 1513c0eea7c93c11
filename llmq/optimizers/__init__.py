"""Optimizers: each is a rule in a file of its own, from which stores, plan and checkpoints derive what they need."""
