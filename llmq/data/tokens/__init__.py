"""Token files: reading and writing them, tokenizers, and the cache."""
