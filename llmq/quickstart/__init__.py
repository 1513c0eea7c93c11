"""`python -m llmq.quickstart`: from this machine's Python sources to a trained model, offline, in a few minutes.

Everything goes through the pieces that users have: token files, `llmq.train`, the exported folder, the plot. A second
call finds all of it made and shows it again.
"""
