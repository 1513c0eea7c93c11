"""Adapters: what is trained beside a frozen model, and their files."""
