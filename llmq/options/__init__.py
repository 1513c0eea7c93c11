"""Options: one description of each gives its flag, its key in a file, its help, its limits and the JSON schema."""
