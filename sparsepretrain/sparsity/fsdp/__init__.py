"""Rows of a weight on this rank, and sharding with FSDP2."""
