"""Refuse Parameters of a method that DistributedDataParallel does not know, and so never averages.

It lists the Parameters of a model when it wraps it. Those that ``sparsify`` adds afterwards, such
as the adapters of SLoPe, would train on each rank with the gradient of that rank alone.
"""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sparsepretrain.errors import ConfigError


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
    known = getattr(wrapper, "_module_parameters", None)  # private: torch tells it nowhere else
    if known is None:
        return
    averaged = {id(parameter) for parameter in known}
    ignored = getattr(wrapper, "parameters_to_ignore", ())
    for name, parameter in root.named_parameters():
        if ".sparsity." in f".{name}" and id(parameter) not in averaged and name not in ignored:
            raise _late(method)


def _late(method: str) -> ConfigError:
    return ConfigError(
        f"{method} adds Parameters, and DistributedDataParallel averages only those that it found "
        "when it wrapped the model: call sparsify first (find_unused_parameters=True, as adapters "
        "have no gradient before their phase), and build wrapper and optimizer afterwards"
    )
