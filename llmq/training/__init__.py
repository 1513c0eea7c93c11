"""The training run: from options to a run that is ready, the loop, its log, its schedule, what watches it."""
