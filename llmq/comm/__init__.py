"""The ranks of a run: who they are, what they send each other, and what is done when one is lost."""
