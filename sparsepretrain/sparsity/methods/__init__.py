"""One module per method; the file name is the name in the registry."""
