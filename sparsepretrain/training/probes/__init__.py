"""Probes: measurements during training, one file each, turned on by ``probe.<name>``."""
