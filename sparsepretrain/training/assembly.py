"""Build the objects of a run from a checked configuration, for real and dry runs alike."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from sparsepretrain import registry
from sparsepretrain.config import freeze, validate
from sparsepretrain.config.groups import ScaledPrecision
from sparsepretrain.config.schema import Run
from sparsepretrain.console import Console
from sparsepretrain.errors import CheckpointError, ConfigError, reason
from sparsepretrain.models._families import as_globs, unassigned
from sparsepretrain.optim import build_optimizer
from sparsepretrain.runs.weights import WeightSource
from sparsepretrain.sparsity import Method, MethodOptions, Sparsifier, densify, sparsify_with
from sparsepretrain.sparsity.engine.banks import is_transposed
from sparsepretrain.sparsity.engine.layer_classes import dense_weights
from sparsepretrain.sparsity.engine.own_forwards import layer_family
from sparsepretrain.sparsity.matmuls.policy import SparseMatmulPolicy
from sparsepretrain.sparsity.method import FineTuning
from sparsepretrain.sparsity.schedule import Window
from sparsepretrain.tasks import ScoredTask, Task, build_task, too_long
from sparsepretrain.training import compilation
from sparsepretrain.training.batches import TrainingBatches
from sparsepretrain.training.classes import class_names, named_classes, order_classes
from sparsepretrain.training.distillation import DistillationLoss, Teacher
from sparsepretrain.training.ema import EMA
from sparsepretrain.training.fixed_masks import (
    keep_fixed_masks,
    require_fixed_mask,
    wanda_masks,
)
from sparsepretrain.training.gradients import Loss, gradients
from sparsepretrain.training.guard import Guard
from sparsepretrain.training.identity import weights_hash
from sparsepretrain.training.observer import Probe
from sparsepretrain.training.observers import Averaging, FlipObserver
from sparsepretrain.training.precision import (
    Options,
    compute_dtype,
    fp8_formats,
    set_dtype,
    set_numerics,
)
from sparsepretrain.training.reach import require_reach
from sparsepretrain.training.recomputation import recompute_blocks
from sparsepretrain.training.routing import BalancedLoss, routers
from sparsepretrain.training.session import Session, Setup
from sparsepretrain.training.tracing import StepCost, step_cost, tracing
from sparsepretrain.training.world import World
from sparsepretrain.training.zeros import zeros_note

META = torch.device("meta")
"""Device of tensors with a shape but no memory."""

HEADS = ("score", "classifier", "pre_classifier", "qa_outputs")
"""Top-level modules whose shape follows from the classes to predict."""

State = dict[str, Tensor]


def build_session(
    run: Run,
    console: Console,
    *,
    splits: Sequence[str] | None = None,
    initial: WeightSource | None = None,
    fresh: bool = False,
    world: World | None = None,
    teacher: Teacher | None = None,
) -> Session:
    """Build everything the loop touches; prepares offline data, writes no run directory.

    Args:
        run: the checked configuration.
        console: shows progress and the source of initial weights.
        splits: data splits to open; None: those that training uses.
        initial: checkpoint of ``init.path`` to load; None: weights are drawn at random.
        fresh: no checkpoint of the run will be loaded: apply ``init.mask``.
        world: ranks that train together; None: only this process.
        teacher: model to imitate; None: the loss is that of the task alone.
    """
    world = world or World.single(run.parallel.device)
    set_numerics(run.precision, deterministic=run.deterministic)
    task = build_task(run)
    trains = splits is None
    device = world.device if trains else None
    # a meta model first: wrong targets or widths fail before data is prepared and weights drawn
    bare = build_model(task, META)
    cost = gpu_cost(run, task, bare, world.device) if trains else None
    seconds = 0.0 if cost is None else cost.eager_seconds(run, world.size)
    scope = compilation.scope_of(run, world.device, seconds)
    inputs = layer_inputs(run, task, bare) if trains and run.sparse_matmuls != "emulate" else {}
    sharded = run.parallel.name == "fsdp" and world.size > 1
    planned = sparsify_model(run, task, bare, device)
    if fresh:
        require_fixed_mask(run, planned, sharded=sharded)
    if not trains or run.eval.batches != 0:
        task.require_metrics()
    if splits is None:
        splits = ("train", "validation") if run.eval.batches != 0 else ("train",)
    task.open_data(splits, on_progress=console.progress)
    # Sharding moves the model to the device block by block; rank 0 draws the weights for all ranks.
    draws = world.is_main or not sharded
    model = build_model(task, (torch.device("cpu") if draws else META) if sharded else world.device)
    if getattr(run.parallel, "sync_batchnorm", False):
        model = synchronized(model, world)
    # before sparsify_model, which computes frozen scales and masks from these weights
    buffers = load_initial(initial, run, task, model, console) if initial and draws else {}
    initial_weights = weights_hash(model) if trains and draws else None
    set_dtype(model, run.precision)
    chooses = fresh and draws
    if chooses:
        initial_tensors = dict(model.named_parameters())
        require_reach(
            run,
            planned,
            {k: initial_tensors[layer.parameter_name] for k, layer in planned.layers.items()},
        )
        del initial_tensors
    calibrated = {}
    if chooses and run.init.mask == "wanda":
        calibrated = wanda_masks(run, task, model, planned.patterns, console)
    sparsifier = sparsify_model(run, task, model, device)
    restore_method(sparsifier, buffers)
    if chooses:
        keep_fixed_masks(run, sparsifier, calibrated)
        del calibrated
    if initial and draws and run.init.mask == "magnitude":
        note = zeros_note(model, sparsifier)
        if note:
            console.info(note)
    if sharded:
        from sparsepretrain.training.shards import shard

        shard(run, model, sparsifier, world)
    optimizer = build_optimizer(model, run.optim, sparsifier.method.build_optimizer)
    sparsifier.attach(optimizer, only_finite=True)  # the guard stops or skips other steps
    sparsifier.store_operands(compute_dtype(run.precision))
    if run.activation_checkpointing:
        recompute_blocks(model)
    forward_model = compilation.compiled(model, scope.mode)
    task.compiles_loss = scope.loss
    loss = Loss(task, forward_model)
    if teacher is not None:
        assert isinstance(task, ScoredTask)  # teachers of other tasks were refused
        loss = DistillationLoss(task, forward_model, teacher.compiled(scope.mode))
    router_loss = task.recipe.router_loss(task.model_options, model)
    if router_loss and routers(model):
        loss = BalancedLoss(loss, router_loss)
    elif router_loss:
        console.info("note: no routers are known in this model: no load-balancing loss is added")
    count = run.batch.size // (run.batch.micro * world.size)
    share = range(world.rank * count, (world.rank + 1) * count)
    ema = None if run.ema is None else EMA(model, run.ema)
    session = Session(
        run=run,
        world=world,
        task=task,
        model=model,
        forward_model=forward_model,
        end=run.steps,
        setup=Setup(cost=cost, compiled=scope.mode, initial_weights=initial_weights),
        sparsifier=sparsifier,
        scaler=_grad_scaler(run.precision, world.device),
        optimizer=optimizer,
        batches=TrainingBatches(
            task, run.batch.size, run.batch.micro, world.device, run.workers, share
        ),
        gradients=gradients(run.parallel, loss, world),
        guard=Guard(run.guard),
        observers=[FlipObserver(sparsifier), *([] if ema is None else [Averaging()])],
        ema=ema,
        on_progress=console.progress,
    )
    if inputs:
        sparsifier.choose_matmuls(inputs, count)
    for name, options in run.probe.items():
        probe: type[Probe[Session]] = registry.get("probe", name)
        session.observers.append(probe(options, session))
    return session


def gpu_cost(run: Run, task: Task, model: nn.Module, device: torch.device) -> StepCost | None:
    """Return the cost of a step, for MFU and ``compile=auto``; None on a CPU, which has neither."""
    return step_cost(run, task, model) if device.type == "cuda" else None


def build_model(task: Task, device: torch.device) -> nn.Module:
    """Return the model on ``device`` with the initial weights of the task's seed.

    Weights are drawn on the CPU, so that they do not depend on the device.
    """
    torch.manual_seed(task.seed)
    if device.type == "meta":
        require_positions(task)
        with device:
            return task.build_model()
    return task.build_model().to(device)


def require_positions(task: Task) -> None:
    """Refuse sequences that are longer than the table of positions of a checkpoint."""
    most = task.recipe.positions(task.model_options)
    if problems := [*too_long(task.options, most, f"{most}, its positions")]:
        raise ConfigError([(key, f" {problem}") for key, problem in problems])


def synchronized(model: nn.Module, world: World) -> nn.Module:
    """Replace BatchNorm by SyncBatchNorm, which torch has on GPUs only."""
    if world.device.type == "cpu":
        text = "expected false on a CPU, got true; SyncBatchNorm needs GPUs"
        raise ConfigError([("parallel.sync_batchnorm", f": {text}")])
    replaced: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return replaced


def layer_inputs(run: Run, task: Task, model: nn.Module) -> dict[str, torch.Size]:
    """Return layer -> input shape for a micro-batch; ``model`` is on the meta device.

    Banks of experts have the shape of all tokens that are sent to an expert, one row each.
    """
    shapes: dict[str, torch.Size] = {}
    names = {module: name for name, module in model.named_modules()}

    def note(module: nn.Module, args: Any) -> None:
        if module in names and args and isinstance(args[0], Tensor):
            shapes[names[module]] = args[0].shape
        if module in names and is_transposed(module) is not None:
            width = args[0].shape[-1]
            # tokens, and the numbers of their experts; Llama 4 passes each token to its expert
            rows = args[1].numel() if len(args) > 1 else args[0].numel() // width
            for key, bank in module._parameters.items():
                if bank is not None and bank.dim() == 3:
                    shapes[f"{names[module]}.{key}"] = torch.Size((rows, width))

    with tracing(model), register_module_forward_pre_hook(note):
        task.loss(model, task.example(run.batch.micro, META))
    return shapes


def sparsify_model(
    run: Run, task: Task, model: nn.Module, device: torch.device | None = None
) -> Sparsifier:
    """Apply the group ``sparsity``; errors name the configuration's keys.

    Args:
        run: the checked configuration.
        task: provides the layer aliases of ``targets``.
        model: dense model on its training device or on the meta device.
        device: training device; None: the model will not be trained.
    """
    options: MethodOptions = run.sparsity
    formats = fp8_formats(run.precision)
    if formats is not None and device is not None:
        formats.require_here(device)
    elif formats is not None and not next(model.parameters()).is_meta:
        formats = formats.simulated  # evaluation does not use fp8 and runs on any device
    policy: str | SparseMatmulPolicy = "emulate"
    if device is not None and run.sparse_matmuls != "emulate":
        policy = SparseMatmulPolicy(run.sparse_matmuls, device)
        policy.require_here(device, compute_dtype(run.precision), formats)
    try:
        return sparsify_with(
            model,
            options,
            targets=resolve_targets(options.targets, task, model),
            roles=task.roles,
            seed=run.seed,
            total_steps=run.steps,
            sparse_matmuls=policy,
            precision=formats,
        )
    except ConfigError as error:
        raise error.under("sparsity") from error


def resolve_targets(targets: str | list[str], task: Task, model: nn.Module) -> list[str]:
    """Replace the aliases among ``targets`` by the recipe's globs; names of layers stay."""
    roles = task.roles
    patterns: list[str] = []
    named = [targets] if isinstance(targets, str) else targets
    layers = [name for name, child in model.named_children() if not [*child.children()]]
    globs = [target.removeprefix("!") for target in named if target not in roles]
    for target in named:
        if target in roles:
            if task.recipe.guesses_roles:
                require_known_layers(target, roles, model, globs)
            patterns += roles[target]
        elif any(c in target for c in "*?[.!") or target in layers:
            patterns.append(target)
        else:
            near = registry.suggestion(target, [*roles, *layers])
            text = f": {target!r} is no alias, layer or glob{near}"
            raise ConfigError(
                [("targets", f"{text}; sparsity.targets=all --dry-run lists the layers")]
            )
    if named and not patterns:
        raise ConfigError([("targets", f": this model has no layers of {', '.join(named)}")])
    return list(dict.fromkeys(patterns))


def require_known_layers(
    alias: str, roles: dict[str, list[str]], model: nn.Module, decided: Sequence[str] = ()
) -> None:
    """Refuse an alias without layers, and one that would leave out layers of its blocks.

    ``decided``: globs of layers that the user has named, to be sparse or to be left out.
    """
    linear = []
    weights = []
    for name, module in model.named_modules():
        own = dense_weights(module)
        if layer_family(type(module)) is not None:
            linear.append(name)
            weights.append(name)
        else:
            weights += [name if key == "weight" else f"{name}.{key}" for key in own]
    if not roles[alias]:
        raise ConfigError(
            [
                (
                    "targets",
                    f": no layers of this model are known as {alias}; write globs of its "
                    f"linear layers, such as {as_globs(linear)}",
                )
            ]
        )
    missing = [
        name
        for name in unassigned(alias, weights, roles)
        if not any(fnmatchcase(name, glob) for glob in decided)
    ]
    if missing:
        raise ConfigError(
            [
                (
                    "targets",
                    f": {alias} would leave out layers of the same blocks, whose roles are "
                    f"not known: {as_globs(missing)}; write globs, such as {as_globs(linear)}",
                )
            ]
        )


def _grad_scaler(options: Options, device: torch.device) -> torch.amp.GradScaler:
    """Dynamic loss scaling for fp16, a scaler that does nothing otherwise."""
    if isinstance(options, ScaledPrecision) and compute_dtype(options) == torch.float16:
        return torch.amp.GradScaler(
            device.type, init_scale=options.init_scale, growth_interval=options.growth_interval
        )
    return torch.amp.GradScaler(device.type, enabled=False)


def load_initial(
    source: WeightSource, run: Run, task: Task, model: nn.Module, console: Console
) -> State:
    """Load the weights of a checkpoint into ``model``, which is not sparse yet.

    Returns:
        state for :func:`restore_method`, called after ``sparsify``; empty unless stored weights
        were loaded from a run whose method computes the same function.
    """
    path = source.path
    if source.config is None:
        options = task.model_options
        if options.family != "pretrained":
            raise CheckpointError(
                f"init.path={path} is a Hugging Face checkpoint: it needs model=pretrained "
                f"model.path={path}, not family {options.family}"
            )
        head = getattr(task, "head", None)
        outputs = getattr(task, "outputs", 0)
        initial = task.recipe.initial_state(options, head, outputs)
        require_finite(initial.state, str(path))
        model.load_state_dict(initial.state)
        console.info(f"initial weights: {path} ({model.__class__.__name__})")
        _tell_new(initial.new, console)
        _tell_unused(initial.unused, console)
        if class_names(task):
            order_classes(model, task, named_classes(model.config), initial.new, console)
        return {}
    method: type[Method] = registry.get("method", run.sparsity.name)
    same = keeps_function(method.finetuning, run.sparsity, source.config["sparsity"])
    stored = run.init.weights == "master" or (run.init.weights == "auto" and same)
    assert source.checkpoint is not None
    state = (
        source.checkpoint.part("model")
        if stored
        else densify(evaluated_model(source)[1]).state_dict()  # pruned and scaled
    )
    weights = {
        name: value
        for name, value in state.items()
        if not any(part.startswith("sparsity") for part in name.split("."))
    }
    new = _copy(model, weights, str(path), console)
    order_classes(model, task, source.config["data"].get("labels", ()), new, console)
    kind = "stored weights" if stored else "the weights that it evaluates with"
    before = source.config["sparsity"]["name"]
    console.info(f"initial weights: {path} (step {source.step}, {before}), {kind}")
    return state if stored and same else {}


def keeps_function(rules: FineTuning, options: MethodOptions, theirs: dict[str, Any]) -> bool:
    """Return True if weights of a run with the options ``theirs`` compute the same function.

    If not, the new run starts from the weights that the finished run evaluates with.
    """
    if rules.zero is not None and attrgetter(rules.zero)(options) > 0:
        return False
    if options.window != Window() or theirs["window"] != {"start": 0.0, "stop": 1.0}:
        return False
    before = {**freeze.flat(theirs), **theirs}
    missing = object()
    keys = ("name", "n", "m", "targets", "patterns", *rules.same)
    return all(before.get(key, missing) == attrgetter(key)(options) for key in keys)


def restore_method(sparsifier: Sparsifier, state: State) -> None:
    """Restore the state that a run's method keeps besides weights (frozen scales, masks).

    The layers then compute the same function as in that run. Counters start at 0, and flips are
    counted from the mask of these weights.
    """
    for layer in sparsifier.layers.values():
        name = layer.module_name
        buffers = {
            key.removeprefix(f"{name}."): value
            for key, value in state.items()
            if key.startswith(f"{name}.sparsity")
        }
        layer.load_state_dict(buffers, strict=False)
    sparsifier.refresh()


def evaluated_model(source: WeightSource) -> tuple[Task, nn.Module, Sparsifier]:
    """Rebuild the evaluated model of a run's checkpoint, without data.

    Returns:
        the task; the model, sparse and in eval mode, on the CPU; its sparsifier, not attached.
    """
    assert source.config is not None and source.checkpoint is not None
    if not registry.named_plugins:  # these replace the checkpoint's, whose files may have moved
        registry.require_imported(source.config.get("plugins"), source.path)
    try:
        run = validate({**source.config, "plugins": []})
        task = build_task(run)
        model = build_model(task, torch.device("cpu"))
        sparsifier = sparsify_model(run, task, model)
        model.load_state_dict(source.model_state(name for name, _ in model.named_parameters()))
    except (ConfigError, RuntimeError) as error:
        raise CheckpointError(f"{source.path} cannot be rebuilt: {reason(error)}") from error
    sparsifier.load_state_dict(source.checkpoint.part("sparsifier"))
    return task, model.eval(), sparsifier


def _copy(model: nn.Module, state: State, path: str, console: Console) -> list[str]:
    """Load by name; a head for another number of classes keeps its initial weights.

    Returns:
        names of the weights that were not loaded.
    """
    current = model.state_dict()
    fitting = {}
    for name, value in state.items():
        if name not in current:
            continue
        if current[name].shape == value.shape:
            fitting[name] = value
        elif name.partition(".")[0] not in HEADS:
            expected = tuple(current[name].shape)
            got = tuple(value.shape)
            raise CheckpointError(
                f"{path} does not fit the model: {name}: expected shape {expected}, got {got}"
            )
    if not fitting:
        raise CheckpointError(f"{path} does not fit the model: no weight name in common")
    model.load_state_dict(fitting, strict=False)
    new = [name for name in current if name not in fitting]
    _tell_new(new, console)
    _tell_unused([name for name in state if name not in current], console)
    return new


def require_finite(state: State, path: str) -> None:
    """Refuse weights with NaN or ∞, with which no run can go on."""
    bad = [name for name, value in state.items() if not bool(value.isfinite().all())]
    if bad:
        more = f" and {len(bad) - 1} more weights" if len(bad) > 1 else ""
        raise CheckpointError(f"{path}: {bad[0]}{more} is not finite: the checkpoint is of no use")


def _tell_unused(names: list[str], console: Console) -> None:
    if unused := sorted(names):
        more = f" and {len(unused) - 3} more" if len(unused) > 3 else ""
        console.info(f"left out: {', '.join(unused[:3])}{more}")


def _tell_new(names: list[str], console: Console) -> None:
    if names:
        console.info(f"newly initialized: {', '.join(sorted(names))}")
