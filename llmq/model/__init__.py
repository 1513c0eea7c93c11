"""A model's shape: config, presets, parameter rows, rope, the way of a micro-batch, the optimizer, speed of light."""
