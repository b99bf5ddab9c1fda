"""Audit of the zeros in anybody's checkpoint: what is N:M, what is not, and what is claimed.

Counts come from the files, a few megabytes at a time; the classes of the layers from a model
without weights, built from config.json.
"""

from __future__ import annotations

import contextlib
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch import nn

from sparsepretrain.console import Console
from sparsepretrain.errors import CheckpointError, ConfigError
from sparsepretrain.export.about import grouped
from sparsepretrain.export.claims import CONFIG, Claim, read_claims
from sparsepretrain.export.loading import as_loaded, model_of, not_loaded
from sparsepretrain.export.perplexity import perplexities, read_tokens
from sparsepretrain.export.weight_files import ModelWeights, Stored, WeightFiles, Weights
from sparsepretrain.export.zero_counts import TINY, ZeroCounts, count_zeros
from sparsepretrain.models.pretrained import WRAPPERS
from sparsepretrain.runs import weights as weights_of_runs
from sparsepretrain.runs.checkpoint import MANIFEST
from sparsepretrain.runs.directory import RunDirectory
from sparsepretrain.sparsity import densify
from sparsepretrain.sparsity.coverage import count_weights
from sparsepretrain.sparsity.engine.layer_classes import dense_weights, replacement_of

COMPRESSED = ("compressed", "bitmask", "weight_packed", "weight_shape", "row_offsets")
"""Last parts of names of weights that are stored without their zeros, or in a few bits."""
PACKED = (*COMPRESSED, "qweight")
"""Last parts of names of tensors that a loader makes the weight from."""
MASKS = ("mask", "weight_mask", "mma_mask")
"""Ends of names of masks beside a weight (torch.nn.utils.prune, ASP)."""
ADAPTERS = ("adapter_config.json", "adapter_model.safetensors")
BLOCK = re.compile(r"(^|\.)\d+\.")
"""Layers of repeated blocks have the number of the block in their names."""


OnProgress = Callable[[int, int, str], None]
"""Called with (done, all, text)."""


@dataclass(frozen=True)
class Finding:
    """Something wrong with a checkpoint."""

    kind: str
    """Name of the defect."""
    where: str
    """Layer, tensor or file."""
    text: str
    is_note: bool = False
    """True if it is no defect: groups with fewer than N non-zeros are N:M."""


@dataclass
class AuditedLayer:
    """Weight that a matmul reads."""

    name: str
    """Name of the layer; of the tensor if no layer holds it."""
    kind: str
    """Class of the layer; ``bank of …``: a matrix per expert in one tensor; ``?``: unknown."""
    axes: tuple[int, ...]
    """The reduction axis of the forward matmul first, then the other one."""
    counts: ZeroCounts
    required: tuple[int, int] | None = None
    """Pattern that the caller or a claim demands."""

    @property
    def pattern(self) -> tuple[int, int] | None:
        """Pattern that the layer is judged by: the demanded one, else the one that it has."""
        return self.required or self.counts.pattern(self.axes[0])


@dataclass
class Audit:
    """Result of an audit."""

    path: str
    required: tuple[int, int] | None = None
    """Pattern that the caller demands."""
    layers: list[AuditedLayer] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    embeddings: int = 0
    """Entries of embeddings."""
    perplexity: list[dict[str, Any]] = field(default_factory=list)
    """One entry per window, see :func:`~sparsepretrain.export.perplexity.perplexities`."""

    @property
    def fails(self) -> bool:
        """True if a pattern was demanded, and a layer does not have it or there is none."""
        if self.required is None:
            return False
        judged = {layer.name for layer in self.layers if layer.required}
        others = {layer.name for layer in self.layers} - judged
        # what is wrong with files, or lies beside the layers, counts; declarations do not
        wrong = [f for f in self.findings if not f.is_note and f.kind != "claim"]
        beside = any(f.kind == "side_branch" for f in wrong)
        return not judged or beside or any(f.where not in others for f in wrong)

    @property
    def entries(self) -> int:
        """Weights of all layers."""
        return sum(layer.counts.entries for layer in self.layers)

    @property
    def nonzeros(self) -> int:
        """Non-zero weights of all layers."""
        return self.entries - sum(layer.counts.zeros for layer in self.layers)


def audit(
    path: str | Path,
    *,
    require: tuple[int, int] | None = None,
    layers: Sequence[str] = (),
    progress: OnProgress | None = None,
) -> Audit:
    """Audit a checkpoint of Hugging Face: a directory, or one safetensors file.

    Args:
        path: directory or file.
        require: (N, M) that layers must have: those of ``layers``, else those that sparsity.json
            names, else all linear layers and convolutions of repeated blocks.
        layers: globs of layers.
        progress: called with (read weights, all weights, text).

    Raises:
        CheckpointError: files are missing, damaged or pickled.
        ConfigError: a glob matches no layer.
    """
    path = Path(path)
    is_directory = path.is_dir()
    adapter = next((name for name in ADAPTERS if is_directory and (path / name).exists()), None)
    with contextlib.closing(WeightFiles(path)) as files:
        model = model_of(path) if is_directory else None
        claims = read_claims(path) if is_directory else []
        weights: Weights = files
        if model is not None and _are_renamed(files, model, claims, layers):
            weights = as_loaded(path) or files
        renamed = weights is not files
        result = audit_weights(
            weights,
            str(path),
            model=model,
            claims=claims,
            require=require,
            globs=layers,
            progress=progress,
        )
        if renamed:
            result.findings += _of_storage(files)
            text = "transformers renames weights of this model: they are audited as it loads them"
            result.findings.append(Finding("renamed", str(path), text, is_note=True))
        elif model is not None and adapter is None:  # transformers would load the adapter too
            result.findings += _of_loading(path, files, model, claims, layers)
    if is_directory and model is None and (path / CONFIG).exists():
        text = "describes no model of transformers: weights are taken for those of nn.Linear"
        result.findings.append(Finding("unknown_model", CONFIG, text, is_note=True))
    if adapter is not None:
        text = "an adapter lies beside the model: loaders add it, and its product is dense"
        result.findings.append(Finding("adapter", adapter, text))
    return result


@dataclass(frozen=True)
class _Place:
    """Layer of a tensor."""

    layer: str
    kind: str
    axes: tuple[int, ...]
    shape: tuple[int, ...] = ()
    """Shape in the model of config.json; (): unknown."""
    is_embedding: bool = False


def _places(model: nn.Module) -> dict[str, _Place]:
    """Return the layers of a model by the names of their weights."""
    census = count_weights(model)
    places = {}
    for name, module in model.named_modules():
        kind = type(module).__name__
        if name in census.embeddings:
            shape = tuple(module.weight.shape)
            places[f"{name}.weight"] = _Place(name, kind, (1, 0), shape, is_embedding=True)
        elif name in census.linears:
            axis = replacement_of(module).in_dim
            shape = tuple(module.weight.shape)
            places[f"{name}.weight"] = _Place(name, kind, (axis, 1 - axis), shape)
        else:
            for key, weight in dense_weights(module).items():
                tensor = f"{name}.{key}" if name else key
                places[tensor] = _of_other(tensor, module, tuple(weight.shape))
    return places


def _of_other(tensor: str, module: nn.Module, shape: tuple[int, ...]) -> _Place:
    """Return the place of a weight that is a Parameter of a module of another class."""
    kind = type(module).__name__
    if len(shape) == 3 and not isinstance(module, nn.Conv1d):
        # (experts, out, in), or (experts, in, out) as in GPT-OSS and Llama 4
        is_transposed = getattr(module, "is_transposed", False)
        return _Place(tensor, f"bank of {kind}", (1, 2) if is_transposed else (2, 1), shape)
    return _Place(tensor, kind, (1, 0), shape)


def _prefix(model: nn.Module) -> str:
    """Return the name of the model without its head within ``model``; "": there is none."""
    return str(getattr(model, "base_model_prefix", ""))


def _spellings(name: str, prefix: str) -> list[str]:
    """Return the names under which transformers takes a tensor of a file for one of the model."""
    if not prefix:
        return [name]
    # files of a model without its head leave the prefix out
    return [name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")]


def _place_of(
    name: str, stored: Stored, places: Mapping[str, _Place], prefix: str
) -> _Place | None:
    """Return the layer of a tensor of a file; None: it is no weight of a matmul."""
    if len(stored.shape) < 2 or not stored.is_plain:
        return None
    for spelling in (*_spellings(name, prefix), *_spellings(WRAPPERS.sub("", name), prefix)):
        if spelling in places:
            return places[spelling]
    if places and not name.endswith("weight") and len(stored.shape) != 3:
        return _Place(name, "?", (1, 0))
    layer = name.removesuffix(".weight")
    if len(stored.shape) == 3:
        return _Place(layer, "?", (2, 1))
    is_embedding = re.search(r"embed|(^|\.)(wte|wpe|shared)$", layer.lower()) is not None
    return _Place(layer, "?", (1, 0), is_embedding=is_embedding and not places)


def audit_weights(
    weights: Weights,
    path: str,
    *,
    model: nn.Module | None,
    claims: Sequence[Claim],
    require: tuple[int, int] | None,
    globs: Sequence[str],
    progress: OnProgress | None = None,
) -> Audit:
    """Do the work of :func:`audit` on tensors by name."""
    result = Audit(path, require, claims=[*claims])
    places = {} if model is None else _places(model)
    prefix = "" if model is None else _prefix(model)
    found = {n: _place_of(n, s, places, prefix) for n, s in weights.stored.items()}
    kept = {name: place for name, place in found.items() if place is not None}
    sizes = {m for _, m in [*([require] if require else ()), *_patterns(claims)]}
    total = sum(_entries(weights, name) for name in kept)
    done = 0
    for name, place in kept.items():
        if place.is_embedding:
            result.embeddings += _entries(weights, name)
        else:
            counts = count_zeros(weights, name, place.axes, sizes)
            result.layers.append(AuditedLayer(place.layer, place.kind, place.axes, counts))
        done += _entries(weights, name)
        if progress is not None:
            progress(done, total, "reading")
    _demand(result, require, globs)
    for layer in result.layers:
        result.findings += _judge(layer)
    result.findings += _side_branches(weights, kept, places)
    result.findings += _of_storage(weights)
    for claim in claims:
        result.findings += _against(claim, result)
    return result


def _patterns(claims: Sequence[Claim]) -> list[tuple[int, int]]:
    return [claim.pattern for claim in claims if claim.pattern]


def _entries(weights: Weights, name: str) -> int:
    return math.prod(weights.stored[name].shape)


def _demand(result: Audit, require: tuple[int, int] | None, globs: Sequence[str]) -> None:
    """Write down which pattern each layer must have."""
    for claim in result.claims:
        for layer in result.layers:
            if claim.covers(layer.name, layer.kind):
                layer.required = claim.pattern
    if require is None:
        if globs:
            raise ConfigError("--layers says which layers must be N:M: give --require N:M too")
        return
    named = {name for claim in result.claims if claim.pattern for name in claim.layers or ()}
    chosen = {layer.name for layer in result.layers if BLOCK.search(layer.name)}
    chosen = chosen or {layer.name for layer in result.layers}  # a model without repeated blocks
    if globs:
        chosen = set()
        for glob in globs:
            hits = {layer.name for layer in result.layers if _matches(layer.name, [glob])}
            if not hits:
                raise ConfigError(f"--layers: no layer matches {glob!r}")
            chosen |= hits
    elif named:
        chosen = named
    for layer in result.layers:
        layer.required = require if layer.name in chosen else None


def _judge(layer: AuditedLayer) -> Iterator[Finding]:
    """Yield the defects of a weight."""
    counts = layer.counts
    axis, other = layer.axes

    def finding(kind: str, text: str) -> Finding:
        return Finding(kind, layer.name, text)

    if counts.not_finite:
        yield finding("not_finite", f"{counts.not_finite:,} values are not finite")
    if counts.negative_zeros:
        text = (
            f"{counts.negative_zeros:,} of {counts.zeros:,} zeros are -0.0: add 0.0 to the weight"
        )
        yield finding("negative_zeros", text)
    pattern = layer.required or counts.pattern(axis)
    if pattern is None:
        turned = counts.pattern(other)
        if turned is not None and counts.holds(other, *turned):
            yield finding("wrong_axis", _wrong_axis(layer, turned))
        return
    n, m = pattern
    if not counts.divides(axis, m):
        size = counts.shape[axis]
        yield finding("indivisible", f"axis {axis} has {size} entries, no multiple of {m}")
    elif counts.holds(axis, n, m):
        if below := counts.below(axis, n, m):
            groups = sum(counts.groups[axis, m])
            text = f"{below:,} of {groups:,} groups of {m} have fewer than {n} non-zeros"
            yield Finding("too_sparse", layer.name, text, is_note=True)
    elif counts.divides(other, m) and counts.holds(other, n, m):
        yield finding("wrong_axis", _wrong_axis(layer, pattern))
    elif counts.almost(axis, n, m):
        text = f"values that should be zero are below {TINY:g} of the largest, and not zero: "
        yield finding("almost_zero", text + "decay left them, and no mask was applied")
    else:
        above, groups = counts.above(axis, n, m), sum(counts.groups[axis, m])
        own = counts.pattern(axis)
        text = f"{above:,} of {groups:,} groups of {m} have more than {n} non-zeros"
        if own is not None and counts.holds(axis, *own):
            text += f": it is {own[0]}:{own[1]}"
        elif not counts.zeros:
            text += ": it is dense"
        yield finding("too_dense", text)


def _wrong_axis(layer: AuditedLayer, pattern: tuple[int, int]) -> str:
    axis, other = layer.axes
    text = f"it is {pattern[0]}:{pattern[1]} along axis {other}"
    if layer.kind == "?":
        return f"{text}, which is right for Conv1D of GPT-2 only"
    return f"{text}, and matmuls of {layer.kind} sum over axis {axis}"


def _side_branches(
    weights: Weights, kept: Mapping[str, _Place], places: Mapping[str, _Place]
) -> Iterator[Finding]:
    """Yield matrices beside a layer, such as adapters, which add a dense product to it.

    They are children of a layer, or tensors that the model of config.json does not have in a
    module that it has. Loaders leave them out, or code of the author adds them.
    """
    layers = {place.layer for name, place in kept.items() if name.endswith("weight")}
    modules = {name.rpartition(".")[0].rpartition(".")[0] for name in places}
    for name, place in kept.items():
        if name in places or place.kind != "?":
            continue
        parents = _parents(place.layer)
        inside = next((parent for parent in parents if parent in layers), None)
        further = bool(places) and parents and parents[0] in modules
        if inside or further:
            shape = " × ".join(map(str, weights.stored[name].shape))
            beside = inside or f"{parents[0]} (config.json does not have it)"
            yield Finding("side_branch", name, f"a matrix of {shape} beside {beside}")


def _parents(name: str) -> list[str]:
    """Return the modules around a name, the nearest first."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1)]


def _of_storage(weights: Weights) -> Iterator[Finding]:
    """Yield what is wrong with how tensors are stored."""
    for name, text in weights.defects.items():
        yield Finding("files", name, text)
    for name, stored in weights.stored.items():
        shape = stored.shape
        head, _, last = name.rpartition(".")
        if last in COMPRESSED:
            text = "zeros are not stored (compressed weights): decompress the checkpoint first"
            yield Finding("compressed", name, text)
        elif last.endswith(MASKS):
            masked = [f"{head}.weight", f"{head}.weight_orig"]
            beside = [k for k in masked if k in weights.stored and weights.stored[k].shape == shape]
            if beside:
                text = (
                    f"a mask lies beside {beside[0]}, and loaders do not apply it: multiply first"
                )
                yield Finding("unapplied_mask", head, text)
        elif last.endswith("weight") and len(shape) > 1 and not stored.is_plain:
            text = f"{stored.dtype} are codes, whose zeros are not counted: dequantize the model"
            yield Finding("quantized", name, text)


def _are_renamed(
    files: WeightFiles, model: nn.Module, claims: Sequence[Claim], globs: Sequence[str]
) -> bool:
    """Return True if a layer that is asked for has another name in the files.

    transformers renames, splits and joins weights of some families when it reads and writes them
    (NomicBERT, experts of Mixtral).
    """
    named = {name for claim in claims for name in claim.layers or ()}
    prefix = _prefix(model)
    stored = {
        spelling for name in files.stored for spelling in _spellings(WRAPPERS.sub("", name), prefix)
    }
    for tensor, place in _places(model).items():
        is_asked_for = place.layer in named or _matches(place.layer, globs)
        if is_asked_for and tensor not in stored:
            return True
    return False


def _matches(layer: str, globs: Sequence[str]) -> bool:
    """Return True if a glob names the layer; a leading ``*.`` also matches at the root."""
    return any(fnmatchcase(f".{layer}", g) or fnmatchcase(layer, g) for g in globs)


def _of_loading(
    directory: Path,
    files: WeightFiles,
    model: nn.Module,
    claims: Sequence[Claim],
    globs: Sequence[str],
) -> Iterator[Finding]:
    """Yield layers of config.json that transformers would not find, and draw at random."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    places = {
        name: place
        for name, place in _places(model).items()
        if not place.is_embedding and name not in tied
    }
    prefix = _prefix(model)
    shapes = {
        spelling: stored.shape
        for name, stored in files.stored.items()
        for spelling in _spellings(name, prefix)
    }
    if all(shapes.get(name) == place.shape for name, place in places.items()):
        return
    try:
        missing, others = not_loaded(directory)
    except CheckpointError as error:
        text = f"names or shapes are not those of config.json, and {error}"
        yield Finding("not_checked", directory.name, text, is_note=True)
        return
    # their zeros are not stored, or stored as codes, which is said elsewhere
    packed = {n.rpartition(".")[0] for n in files.stored if n.rpartition(".")[2] in PACKED}
    lost = [name for name in missing if name in places and places[name].layer not in packed]
    if lost and len(lost) == len(places):
        first = next(iter(files.stored), directory.name)
        text = f"transformers finds none of the {len(lost)} layers of config.json in the files"
        if wrapper := WRAPPERS.search(first):
            text += f", whose names have {wrapper[0]!r}: save the model inside of the wrapper"
        yield Finding("missing_layer", first, text)
        return
    claimed = {name for claim in claims for name in claim.layers or ()}

    def is_beside(layer: str) -> bool:
        """Return True of a layer that is not judged, such as the head of another task."""
        return not _matches(layer, globs) if globs else BLOCK.search(layer) is None

    for name in lost:
        layer = places[name].layer
        if layer not in claimed:  # said by the claim
            text = "config.json has it, the files do not: transformers would draw it at random"
            yield Finding("missing_layer", layer, text, is_note=is_beside(layer))
    for name, (stored_shape, own) in others.items():
        if name in places:
            layer = places[name].layer
            text = f"has the shape {stored_shape}, and the model of config.json has {own}"
            yield Finding("shape", layer, text, is_note=is_beside(layer))


def _against(claim: Claim, result: Audit) -> Iterator[Finding]:
    """Yield what a file says and the weights do not."""
    names = {layer.name for layer in result.layers}
    for name in claim.layers or ():
        if name not in names:
            yield Finding(
                "missing_layer", name, f"{claim.source} names it, the weights do not have it"
            )
    covered = [layer for layer in result.layers if claim.covers(layer.name, layer.kind)]
    if claim.pattern is not None:
        pattern = "{}:{}".format(*claim.pattern)
        wrong = [
            layer.name for layer in covered if not layer.counts.holds(layer.axes[0], *claim.pattern)
        ]
        if not covered:
            yield Finding("claim", claim.source, f"{pattern} is declared, of no layer that exists")
        elif wrong:
            more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            text = f"{pattern} is declared of {len(covered)} layers, and {wrong[0]}{more} is not"
            yield Finding("claim", claim.source, text)
    elif claim.layers == ():
        sparse = [layer.name for layer in result.layers if layer.counts.pattern(layer.axes[0])]
        if sparse:
            text = f"dense weights are declared, and {len(sparse)} layers are N:M ({sparse[0]})"
            yield Finding("claim", claim.source, text)
    if claim.zeros is not None and covered:
        entries = sum(layer.counts.entries for layer in covered)
        share = sum(layer.counts.zeros for layer in covered) / entries
        if abs(share - claim.zeros) > 0.01:
            text = f"{claim.zeros:.1%} zeros are declared, and there are {share:.1%}"
            yield Finding("claim", claim.source, text)


def audit_any(
    checkpoint: str,
    *,
    require: tuple[int, int] | None,
    layers: Sequence[str],
    texts: Sequence[Path],
    console: Console,
) -> Audit:
    """Audit what a user names: files of Hugging Face, or a run, by its evaluated weights.

    Raises:
        CheckpointError, ConfigError, DataError: with a one-line message.
    """
    path = Path(checkpoint).expanduser()
    is_run = (path / MANIFEST).is_file() or RunDirectory(path).checkpoints.is_dir()
    if path.exists() and not is_run:
        progress = console.counter("weights")
        result = audit(path, require=require, layers=layers, progress=progress)
        if texts:
            tokens = read_tokens(path, texts)
            result.perplexity = perplexities(path, tokens, progress=console.counter("windows"))
        console.stop()
        return result
    # imported here: it takes memory that an audit of files does not need
    from sparsepretrain.training.assembly import evaluated_model

    if texts:
        raise ConfigError("--text needs a tokenizer beside the weights: export the run first")
    source = weights_of_runs.find(checkpoint, console.warn)
    if source.config is None:
        raise ConfigError(f"{checkpoint} is a name on the hub: download it, and give the directory")
    _, model, sparsifier = evaluated_model(source)
    proof = sparsifier.prove()
    claims = []
    if proof.sparse:
        groups = grouped(sparsifier.patterns)
        claims += [Claim("the run", pattern, tuple(names)) for pattern, names in groups.items()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of dense phases and adapters: the audit says so
        dense = densify(model)
    # a head that is tied to the embedding is no weight of its own
    state = ModelWeights({name: p.detach() for name, p in dense.named_parameters()})
    return audit_weights(
        state, str(source.path), model=dense, claims=claims, require=require, globs=layers
    )
