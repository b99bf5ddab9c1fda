"""Text sources, one module each; see :class:`sparsepretrain.data.source.Source`."""
