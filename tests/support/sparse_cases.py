"""Methods with option variants, and small models made sparse."""

import pytest
import torch
from torch import nn

import sparsepretrain as sp
from sparsepretrain import registry
from support.small_models import ConvNet, Net

STEPS = 40
"""``total_steps`` of all small runs."""
VARIANTS = [
    ("ste", {"n": 1}),
    ("ste", {"n": 2, "m": 8}),
    ("ste", {"n": 4, "m": 8}),
    ("srste", {"decay": 0.1}),
    ("srste", {"decay": 0.1, "decay_on": "weight"}),
    ("srste", {"n": 1, "m": 16}),
    ("sste", {"gamma": 0.3}),
    ("sste", {"beta": "l1", "beta_update": "step"}),
    ("sste", {"beta": "none", "estimator": "exact"}),
    ("sste", {"mvue": "none", "ste_scale": "beta"}),
    ("sste", {"mvue": "weight"}),
    ("sste", {"mvue": "weight", "estimator": "exact", "gamma": 0.1, "ste_scale": "beta"}),
    ("sste", {"n": 2, "m": 8}),
    ("srste", {"decay": 0.1, "decay_ramp": 0.1}),
    ("tsrste", {"decay": 0.1, "decay_ramp": 0.1, "refresh": 2, "dense_tail": 0.0}),
    ("tsrste", {"n": 4, "m": 8, "refresh": 2}),
    ("tsrste", {"n": 1, "refresh": 3}),
    ("bimask", {"n": 4, "m": 8, "every": 2}),
    ("dense", {"flip_rule": "transposable", "refresh": 2}),
    ("dense", {"flip_rule": "transposable", "n": 2, "m": 8}),
    ("sdgp", {"epsilon": 1e-4}),
    ("sdgp", {"variant": "random", "n": 2, "m": 8}),
    ("mdgf", {"until": 0.05}),
    ("mdgf", {"shape": "exponential"}),
    ("sdgf", {"n": 1, "m": 8, "until": 0.1}),
    ("slope", {"mask": "random"}),
    ("slope", {"n": 1, "m": 4}),
    ("ast", {"decay": 0.1, "decay_ramp": 0.1, "refresh": 2}),
    ("ast", {"n": 1, "m": 8, "decay_ramp": 0.0, "refresh": 1}),
    ("cast", {"decay": 0.01, "refresh": 2, "scales": 4}),
    ("ternary", {"n": 1, "m": 8}),
]
LEARNED = [n for n in sp.list_methods() if registry.get("method", n).trains != "model"]
"""Methods that learn masks of weights that stay as they are, see test_learned_masks.py."""
TRAINED = [name for name in sp.list_methods() if name not in LEARNED]
CASES = [(name, {}) for name in TRAINED] + VARIANTS
CONVOLVED = [case for case in CASES if "convolution" in registry.get("method", case[0]).layer_kinds]
"""Cases that convolutions have too."""
SETTLED = {"mdgf": {"until": 0.0}, "sdgf": {"until": 0.0}, "asp": {"at": 0.0}}
"""Options with which the first step sees the last phase."""
PACKED = {
    **dict.fromkeys(("ste", "srste", "step", "bimask", "asp", "mdgf", "sdgf", "ast"), "A"),
    "ternary": "A",
    **{"sste": "AU", "tsrste": "ABU", "slope": "AB", "sdgp": "P"},
}
"""Operands of the table that are packed, by method; the others have none that is 2:4."""


def ids(cases):
    return ["-".join([name, *(f"{k}={v}" for k, v in options.items())]) for name, options in cases]


IDS = ids(CASES)
every_case = pytest.mark.parametrize(("method", "options"), CASES, ids=IDS)
every_net = pytest.mark.parametrize(
    ("method", "options", "net"),
    [(*case, Net) for case in CASES] + [(*case, ConvNet) for case in CONVOLVED],
    ids=[*IDS, *(f"{name}-convolutions" for name in ids(CONVOLVED))],
)


def sparsify(model, method, **options):
    options = {"targets": ["fc*"], "total_steps": STEPS, "seed": 3} | options
    return sp.sparsify(model, method, **options)


def sparse_layer(method, weight, bias=None, **options):
    """(model, sparsifier) of one linear layer."""
    model = nn.Sequential(nn.Linear(*reversed(weight.shape), bias=bias is not None))
    model[0].weight.data.copy_(weight)
    if bias is not None:
        model[0].bias.data.copy_(bias)
    return model, sp.sparsify(model, method, targets="0", **options)


def optimizer_for(method, parameters, cls=torch.optim.AdamW, **options):
    """The kind of optimizer that ``method`` needs, else ``cls``."""
    if method == "step":
        from sparsepretrain.optim import StepAdamW

        return StepAdamW(
            parameters, lr=1e-2, betas=(0.9, 0.99), eps=1e-8, frozen_bias_correction=True
        )
    if method in ("ast", "cast"):
        from sparsepretrain.optim import AdamS, ASTAdamW

        options.pop("fused", None)
        return {"ast": ASTAdamW, "cast": AdamS}[method](parameters, **{"lr": 1e-2} | options)
    return cls(parameters, **{"lr": 1e-2} | options)


def build(
    method, options=None, *, dtype=torch.float64, seed=0, cls=torch.optim.AdamW, net=Net, **settings
):
    """(model, optimizer, attached sparsifier)."""
    model = net(dtype, seed)
    sparsifier = sparsify(model, method, **options or {})
    optimizer = optimizer_for(method, model.parameters(), cls, **settings)
    sparsifier.attach(optimizer)
    return model, optimizer, sparsifier
