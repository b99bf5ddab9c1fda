"""A run on disk: its directory, record and checkpoints; nothing else knows where a file lies."""
