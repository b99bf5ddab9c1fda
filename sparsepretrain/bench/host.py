"""Host time of a call of a kernel, beside that of ``torch.mul``: a GPU that is faster waits for it.

Needs no GPU: all but Triton's own launch is done, on small tensors of the CPU. What counts is the
processor time of the thread.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from unittest.mock import patch

import torch

from sparsepretrain import kernels
from sparsepretrain.bench.progress import Phase
from sparsepretrain.bench.timing import Case, interleaved, ratio
from sparsepretrain.errors import ConfigError

CALLS = 200
"""In a row, in each round."""
AT_MOST = 12.0


def cases(quick: bool) -> list[Case]:
    """One ratio per kernel of a training step.

    Raises:
        ConfigError: triton is not installed.
    """
    try:
        from triton.runtime.jit import JITFunction

        from sparsepretrain.kernels.triton import KERNELS
    except ImportError as error:
        raise ConfigError("suite=host needs triton, which torch brings on Linux") from error
    rounds = 5 if quick else 40
    works: dict[str, Callable[[], object]] = {
        name: functools.partial(_often, call) for name, call in _calls(KERNELS).items()
    }
    with patch.object(JITFunction, "run", lambda *_, **__: None), torch.no_grad():
        phase = Phase("calls", rounds, "rounds")
        seconds = interleaved(works, rounds=rounds, clock=time.thread_time, on_round=phase)
    under = seconds.pop("torch.mul")
    return [
        ratio(f"{name} over torch.mul", over, under, at_most=AT_MOST)
        for name, over in seconds.items()
    ]


def _often(call: Callable[[], object]) -> None:
    for _ in range(CALLS):
        call()


def _calls(triton: dict[str, Callable[..., object]]) -> dict[str, Callable[[], object]]:
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 64, generator=draw)
    gradient = torch.randn(64, 96, generator=draw).bfloat16()
    mask, beta, clock = weight > 0, torch.ones(()), torch.zeros(2, dtype=torch.int64)
    code = kernels.pack_24(mask)
    key = kernels.ClockKey(clock, 5, 3, 2, 24)
    return {
        "torch.mul": lambda: torch.mul(weight, weight),
        "soft_threshold": lambda: triton["soft_threshold"](
            weight, 2, 4, 0.0, -1, beta, torch.bfloat16
        ),
        "nm_prune": lambda: triton["nm_prune"](weight, 2, 4, -1, False),
        "transposable_mask": lambda: triton["transposable_mask"](weight),
        "mvue": lambda: triton["mvue"](gradient, 0, "approximate", None, key, None),
        "prune_gradient": lambda: triton["prune_gradient"](gradient, 2, 4, 1),
        "pack_24": lambda: triton["pack_24"](mask),
        "packed_flip_count": lambda: triton["packed_flip_count"](code, code),
        "masked_decay_": lambda: triton["masked_decay_"](weight, weight, mask, 1e-4),
    }
