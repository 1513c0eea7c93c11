"""Plug-ins of llmq, each in a file of its own; pyproject.toml names them."""
