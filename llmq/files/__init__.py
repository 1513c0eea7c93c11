"""What lies on disk: models of the Hub and folders, weights, checkpoints, exports."""
