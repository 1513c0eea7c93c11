"""The training run: from options to a ready job, the loop, its log, its schedule, what watches it."""
