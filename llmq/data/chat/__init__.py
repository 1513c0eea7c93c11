"""From rows to tokens and masks: formats, chat templates, turns."""
