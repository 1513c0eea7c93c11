"""What Python's users import: `Trainer`, its configuration and presets, callbacks, and data that they hold."""
