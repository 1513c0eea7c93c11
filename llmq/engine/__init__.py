"""A plan made flesh: memory, bound programs, measuring, generating."""
