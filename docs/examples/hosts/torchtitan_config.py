"""A module for `torchrun … -m torchtitan.train --module torchtitan_config --config sparse_debug`.

Layers become sparse on the meta device, before torchtitan parallelizes the model.
"""

from torchtitan.models.llama3.config_registry import llama3_debugmodel

from sparsepretrain.integrations.torchtitan import sparse_spec


def sparse_debug():
    """Return llama3_debugmodel with 2:4 sparse feed-forward layers."""
    config = llama3_debugmodel()
    config.model_spec = sparse_spec(config.model_spec, "sste", targets=["*.feed_forward.*"])
    return config
