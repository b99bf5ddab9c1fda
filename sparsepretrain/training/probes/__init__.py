"""What can be measured while a run is trained: a file per probe, turned on by ``probe.<name>``."""
