"""Several runs, one table: the engine, and the search of a decay factor."""
