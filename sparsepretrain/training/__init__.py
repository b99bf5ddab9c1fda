"""One run: session, assembly, loop, evaluation, and runs derived from checkpoints."""
