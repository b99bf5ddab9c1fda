"""Image classifiers of timm: vision transformers (DeiT), ResNets and RegNets."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from torch import Tensor, nn

from sparsepretrain.errors import ConfigError, Problems, needs, reason
from sparsepretrain.models import Head, Recipe
from sparsepretrain.models._text import Activation, transformers_name
from sparsepretrain.registry import register

_FFN = ["blocks.*.mlp.fc1", "blocks.*.mlp.fc2"]
_ATTENTION = ["blocks.*.attn.qkv", "blocks.*.attn.proj"]
_TRANSFORMER = {"ffn": _FFN, "ffn_out": _FFN[1:], "attention": _ATTENTION}
# of a shortcut with pooling (resnet50d) the convolution is the second part; norms are no targets
_RESNET = ["layer*.conv?", "layer*.downsample.[01]"]
_REGNET = ["s?.b*.conv?.conv", "s?.b*.downsample.conv"]
_ROLES: dict[str, dict[str, list[str]]] = {
    "deit": _TRANSFORMER,
    "vit": _TRANSFORMER,
    # ffn_out: layers behind an activation inside a block
    "resnet": {"convs": _RESNET, "ffn": _RESNET, "ffn_out": ["layer*.conv[23]"]},
    "regnet": {"convs": _REGNET, "ffn": _REGNET, "ffn_out": ["s?.b*.conv[23].conv"]},
}
"""Prefix of a timm name -> alias of ``sparsity.targets`` -> globs.

The stem of a convolutional network stays dense under every alias: its 3 input channels are not a
multiple of 4. SR-STE's released code prunes the stem in groups over input channels and kernel
positions (arXiv:2102.04010); the stem has 0.04 % of ResNet-50's weights.
"""


@dataclass(slots=True, kw_only=True)
class TimmOptions:
    """Architecture; null: timm's default for that name."""

    name: str
    family: Literal["timm_image"]
    architecture: str
    image_size: Annotated[int, "> 0"]
    classes: Annotated[int, "> 0"]
    stem: Literal["imagenet", "cifar"]
    patch_size: Annotated[int | None, "> 0"]
    depth: int | list[int] | None
    width: int | list[int] | None
    heads: Annotated[int | None, "> 0"]
    activation: Activation | None
    zero_init_last: bool | None
    drop_path: Annotated[float, "[0, 1)"]
    dropout: Annotated[float, "[0, 1)"]

    @property
    def kind(self) -> str | None:
        """Known kind of architecture; None: unknown."""
        return next((kind for kind in _ROLES if self.architecture.startswith(kind)), None)

    def problems(self) -> Problems:
        if self.kind is None:
            kinds = ", ".join(_ROLES)
            yield "architecture", f"must begin with {kinds}, got {self.architecture!r}"
            return
        patches = self.kind in ("deit", "vit")
        resnet = self.kind == "resnet"
        if self.stem != "imagenet" and not resnet:
            why = ": it has patches" if patches else ""
            yield "stem", f"must be imagenet for {self.architecture}{why}"
        absent = ["zero_init_last"] if patches else ["patch_size", "heads", "activation"]
        if not patches and not resnet:
            absent += ["depth", "width"]
        for key in absent:
            if getattr(self, key) is not None:
                yield key, f"must be null for {self.architecture}"
        what = "a positive integer" if patches else "4 positive integers"
        for key in ("depth", "width") if patches or resnet else ():
            value = getattr(self, key)
            sizes = value if isinstance(value, list) else [value]
            fits = isinstance(value, list) != patches and len(sizes) == (1 if patches else 4)
            if value is not None and not (fits and min(sizes) > 0):
                yield key, f"must be {what} or null for {self.architecture}"
        if isinstance(self.width, int) and self.heads and self.width % self.heads:
            yield "heads", f"must divide model.width ({self.width}), got {self.heads}"
        if self.patch_size and self.image_size % self.patch_size:
            yield "patch_size", f"must divide model.image_size ({self.image_size})"


@register("model", "timm_image")
class TimmImage(Recipe):
    """Models of timm."""

    Options = TimmOptions
    tasks = frozenset({"image_classification"})

    @classmethod
    def roles(cls, options: TimmOptions) -> dict[str, list[str]]:
        """Return aliases of ``sparsity.targets``; none has patch embedding, stem or classifier.

        Without an FFN, ``ffn`` is all convolutions, so that the default target works.
        """
        roles = _ROLES[str(options.kind)]
        return {**roles, "all": [*roles["ffn"], *roles.get("attention", ())]}

    @staticmethod
    def build(options: TimmOptions) -> nn.Module:
        """Build a timm model with timm's initialization; convolutions N(0, 2/(k²·out))."""
        with needs("model.family=timm_image", "timm", "vision", error=ConfigError):
            import timm
        arguments = TimmImage.arguments(options)
        if options.activation is not None:
            from transformers.activations import ACT2FN

            name = transformers_name(options.activation)
            arguments["act_layer"] = functools.partial(ACT2FN.__getitem__, name)
        try:
            model = timm.create_model(options.architecture, **arguments)
        except (TypeError, ValueError, AssertionError, RuntimeError) as error:
            why = reason(error)
            raise ConfigError(f"timm cannot build {options.architecture}: {why}") from error
        if options.stem == "cifar":
            _shrink_stem(model)
        return model

    @classmethod
    def stock(cls, model: nn.Module, options: TimmOptions, head: Head | None) -> nn.Module:
        import timm

        if options.stem == "cifar":
            raise ConfigError(f"timm's {options.architecture} has no 3×3 stem (model.stem=cifar)")
        if options.activation == "relu2":
            raise ConfigError("timm has no activation relu2 (model.activation)")
        stock: nn.Module = timm.create_model(options.architecture, **cls.arguments(options))
        stock.load_state_dict(model.state_dict())
        return stock.eval()

    @staticmethod
    def arguments(options: TimmOptions) -> dict[str, Any]:
        """Return the options that are not null under timm's names, as JSON values."""
        arguments: dict[str, Any] = {"num_classes": options.classes, "drop_rate": options.dropout}
        if options.drop_path:
            arguments["drop_path_rate"] = options.drop_path
        if options.kind in ("deit", "vit"):
            arguments["img_size"] = options.image_size
            names = {"activation": "act_layer", "patch_size": "patch_size", "depth": "depth"}
            names |= {"width": "embed_dim", "heads": "num_heads"}
        else:
            names = {"depth": "layers", "width": "channels", "zero_init_last": "zero_init_last"}
        given = {theirs: getattr(options, ours) for ours, theirs in names.items()}
        return arguments | {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in given.items()
            if value is not None
        }

    @staticmethod
    def logits(model: nn.Module, images: Tensor) -> Tensor:
        """Map (batch, 3, image_size, image_size) fp32 to (batch, classes)."""
        return model(images)


def _shrink_stem(model: Any) -> None:
    """Use a 3×3 stem without pooling (He et al., 2016, section 4.2), initialized as by timm."""
    old = model.conv1
    if not isinstance(old, nn.Conv2d):
        text = "expected imagenet, got cifar; the stem of this architecture is several convolutions"
        raise ConfigError([("model.stem", f": {text}")])
    model.conv1 = nn.Conv2d(old.in_channels, old.out_channels, 3, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()
