"""Refuse Parameters of a method that DistributedDataParallel does not know, and so never averages.

It lists the Parameters of a model when it wraps it. Those that ``sparsify`` adds afterwards, such
as the adapters of SLoPe, would train on each rank with the gradient of that rank alone.
"""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sparsepretrain.errors import ConfigError

CHECKED = "_sparse_roots"
"""Attribute of a wrapper: ids of the sparse models whose Parameters it knows."""


def refuse_wrapped(model: nn.Module, method: str) -> None:
    """Refuse to add Parameters to a model that is wrapped, or has a wrapped part.

    Raises:
        ConfigError: it is.
    """
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise _late(method)


def require_known_parameters(root: nn.Module, method: str) -> None:
    """Refuse Parameters of ``root`` that the wrapper whose forward is running does not average.

    Raises:
        ConfigError: there is one.
    """
    wrapper = DistributedDataParallel._active_ddp_module
    # private: torch tells it nowhere else
    known = getattr(wrapper, "_module_parameters", None)
    if wrapper is None or known is None:
        return
    checked = wrapper.__dict__.setdefault(CHECKED, set())
    if id(root) in checked:
        return
    averaged = {id(parameter) for parameter in known}
    for name, parameter in wrapper.module.named_parameters():
        if name in wrapper.parameters_to_ignore:  # on purpose
            averaged.add(id(parameter))
    for name, parameter in root.named_parameters():
        if ".sparsity." in f".{name}" and id(parameter) not in averaged:
            raise _late(method)
    checked.add(id(root))


def _late(method: str) -> ConfigError:
    return ConfigError(
        f"{method} adds Parameters, and DistributedDataParallel averages only those that it found "
        "when it wrapped the model: call sparsify first (find_unused_parameters=True, as adapters "
        "have no gradient before their phase), and build wrapper and optimizer afterwards"
    )
