"""How good a model is: metrics on held-out data, and tasks of lm-evaluation-harness."""
