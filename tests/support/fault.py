"""A plug-in that breaks one process: ``FAULT=kind:rank:forward`` of the loss."""

import os
import signal
import time

from sparsepretrain.errors import DataError
from sparsepretrain.training import gradients

kind, rank, number = os.environ.get("FAULT", "none:-1:0").split(":")
forward, calls = gradients.Loss.forward, [0]


def broken(own, batch):
    calls[0] += 1
    if calls[0] != int(number) or os.environ.get("RANK", "0") != rank:
        return forward(own, batch)
    if kind == "data":
        raise DataError("a shard cannot be read")
    if kind == "defect":
        raise KeyError("a defect")
    if kind == "hang":
        time.sleep(3600)
    if kind in ("SIGKILL", "SIGTERM"):
        os.kill(os.getpid(), getattr(signal, kind))
    loss, *terms = forward(own, batch)
    return (loss * float("nan") if kind == "nan" else loss, *terms)


gradients.Loss.forward = broken
