"""What is wrong with this machine for training, how it shows, and what to do: the checks of `llmq-doctor`."""
