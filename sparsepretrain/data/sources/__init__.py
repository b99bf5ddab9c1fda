"""Text sources, one module each; see :class:`sparsepretrain.data.sources._source.Source`."""
