"""Image models: sizes as published, layers by role, what the optimizers see."""

import dataclasses
import io
from fnmatch import fnmatchcase

import pytest
import torch
from torch import nn

from sparsepretrain import config
from sparsepretrain.config.places import catalog
from sparsepretrain.console import Console
from sparsepretrain.errors import ConfigError
from sparsepretrain.models.timm_image import TimmImage
from sparsepretrain.optim import build_optimizer
from sparsepretrain.tasks import build_task
from sparsepretrain.training.assembly import build_model, sparsify_model
from sparsepretrain.training.plan import dry_run

META = torch.device("meta")
# as timm and the papers state them
SIZES = {
    "deit_tiny": 5_717_416, "deit_small": 22_050_664, "deit_base": 86_567_656,
    "resnet18": 11_689_512, "resnet50": 25_557_032, "regnetx_400mf": 5_157_512,
    "resnet18_cifar": 11_173_962, "vit_nano": 205_002, "resnet_nano": 318_186,
}  # fmt: skip
SPARSE = {
    "deit_small": 12 * 2 * 4 * 384**2,
    "resnet50": 25_557_032 - 2_049_000 - 64 * 3 * 49 - 53_120,
    "resnet18_cifar": 11_173_962 - 5_130 - 64 * 27 - 9_600,
}
"""Weights under the default targets: all without classifier, stem and batch norms, or the FFN."""
EXPERIMENTS = [
    e for e in catalog()["experiment"]
    if e.startswith(("nano_vision", "sdgp_", "srste_resnet", "bimask_", "tsrste_deit"))
]  # fmt: skip


def load(*overrides):
    return config.load(["tracker.mode=disabled", "parallel.device=cpu", *overrides])


def test_dry_run_prints_the_published_size():
    out = io.StringIO()
    dry_run(load("model=resnet18_cifar"), Console(out))
    assert f" {SIZES['resnet18_cifar']:,} (" in out.getvalue()
    assert "FLOPs per image" in out.getvalue() and "images in all" in out.getvalue()


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_experiments_build(experiment):
    run = load(f"experiment={experiment}")
    task = build_task(run)
    layers = sparsify_model(run, task, build_model(task, META)).layers
    assert run.name == experiment and len(layers) >= 8


@pytest.mark.parametrize(
    ("architecture", "stem"), [("resnet18d", "cifar"), ("resnet50d", "imagenet")]
)
def test_stems_and_shortcuts_of_several_layers(architecture, stem):
    model = "resnet18_cifar" if stem == "cifar" else "resnet50"
    run = load(f"model={model}", f"model.architecture={architecture}")
    task = build_task(run)
    if stem == "cifar":
        with pytest.raises(ConfigError, match=r"model\.stem: expected imagenet, got cifar"):
            build_model(task, META)
        return
    layers = sparsify_model(run, task, build_model(task, META)).layers
    shortcuts = [name for name in layers if "downsample" in name]
    assert shortcuts == [f"layer{i}.0.downsample.1" for i in range(1, 5)]


@pytest.mark.parametrize("model", SIZES)
def test_sizes_are_published_and_roles_leave_out_stem_and_classifier(model):
    run = load(f"model={model}")
    task = build_task(run)
    net = build_model(task, META)
    assert sum(p.numel() for p in net.parameters()) == SIZES[model]
    layers = {k: v for k, v in net.named_modules() if isinstance(v, nn.Linear | nn.Conv2d)}
    if model in SPARSE:
        ffn = {k for k in layers if any(fnmatchcase(k, p) for p in task.roles["ffn"])}
        assert sum(layers[k].weight.numel() for k in ffn) == SPARSE[model]
    chosen = {k for k in layers if any(fnmatchcase(k, p) for p in task.roles["all"])}
    left = [v for k, v in layers.items() if k not in chosen]
    assert len(left) == 2  # the stem or patches, and the classifier
    assert left[0].in_channels == 3 and left[1].out_features == run.model.classes
    for role, patterns in task.roles.items():
        found = {k for k in layers if any(fnmatchcase(k, p) for p in patterns)}
        assert found and found <= chosen, role
        assert all(any(fnmatchcase(k, p) for k in layers) for p in patterns)


def test_small_stem_keeps_the_resolution():
    run = load("model=resnet18_cifar")
    net = build_model(build_task(run), torch.device("cpu")).eval()
    shapes = []
    net.layer1.register_forward_hook(lambda m, args, out: shapes.append(args[0].shape[2:]))
    with torch.no_grad():
        assert net(torch.zeros(1, 3, 32, 32)).shape == (1, 10)
    assert shapes == [(32, 32)] and net.conv1.kernel_size == (3, 3)


def test_convolutional_networks_start_as_in_sr_ste():
    run = load("model=resnet_nano", "model.zero_init_last=false")
    net = build_model(build_task(run), torch.device("cpu"))
    for name, module in net.named_modules():
        if isinstance(module, nn.BatchNorm2d):
            assert (module.weight == 1).all() and not module.bias.any(), name
        elif isinstance(module, nn.Conv2d):
            weight = module.weight.detach()
            fan_out = module.kernel_size[0] ** 2 * module.out_channels // module.groups
            # the standard error of a standard deviation is σ/√(2n)
            error = 5 / (2 * weight.numel()) ** 0.5
            assert float(weight.std()) == pytest.approx((2 / fan_out) ** 0.5, rel=error), name
    zeros = TimmImage.build(dataclasses.replace(run.model, zero_init_last=None))
    assert any(not m.weight.any() for m in zeros.modules() if isinstance(m, nn.BatchNorm2d))


def test_embeddings_norms_and_biases_are_not_decayed():
    run = load("model=vit_nano", "optim=lion")
    net = build_model(build_task(run), torch.device("cpu"))
    groups = build_optimizer(net, run.optim).param_groups
    assert [g["weight_decay"] for g in groups] == [run.optim.weight_decay, 0.0]
    names = {id(p): k for k, p in net.named_parameters()}
    free = {names[id(p)] for p in groups[1]["params"]}
    assert {"pos_embed", "cls_token"} <= free
    assert all(k.endswith(".weight") for k in {names[id(p)] for p in groups[0]["params"]})
    assert len(names) == sum(len(g["params"]) for g in groups)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("model.architecture=deit_tinny_patch16_224",), "timm cannot build deit_tinny"),
        (("optim=lion", "sparsity=step"), "sparsity=step needs optim=adamw"),
    ],
)
def test_unknown_architecture_and_optimizer_are_refused(overrides, words):
    run = load("model=vit_nano", *overrides)
    with pytest.raises(ConfigError, match=words):
        net = build_model(build_task(run), META)
        method = sparsify_model(run, build_task(run), net).method
        build_optimizer(net, run.optim, method.build_optimizer)
