"""Studies: several runs as one table."""
