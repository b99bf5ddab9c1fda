"""litgpt's pre-training has no hooks, so two functions of its module are replaced."""

from litgpt import pretrain

import sparsepretrain as sp

initialize, make_optimizer = pretrain.initialize_weights, pretrain.instantiate_torch_optimizer
sparsifiers = []


def initialize_weights(fabric, model, **sizes):
    """Initialize, then make the layers sparse; litgpt compiles and wraps the model afterwards."""
    initialize(fabric, model, **sizes)
    sparsifiers.append(sp.sparsify(model, "sste", targets=["*.mlp.*"]))


def instantiate_torch_optimizer(*args, **options):
    """Build the optimizer and attach to it."""
    optimizer = make_optimizer(*args, **options)
    sparsifiers[-1].attach(optimizer)
    return optimizer


pretrain.initialize_weights = initialize_weights
pretrain.instantiate_torch_optimizer = instantiate_torch_optimizer
# pretrain.setup("pythia-14m", …), then for litgpt's other commands:
# torch.save({"model": sparsifiers[-1].dense_state_dict()}, "out/final/lit_model.pth")
