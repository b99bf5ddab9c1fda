"""A run of torchtitan's Trainer on a CPU, where some of its parts do not work: they are replaced.

    python titan_run.py FOLDER STEPS METHOD OPTIONS [hf]

Prints what the run came to as JSON. FOLDER may have checkpoints to resume from.
"""

import json
import os
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import torch

os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
os.environ.setdefault("MASTER_PORT", "29511")

from torchtitan.tools import utils

utils.device_type, utils.device_module = "cpu", torch.cpu

import torchtitan.components.metrics as metrics  # noqa: E402
import torchtitan.distributed.utils as distributed  # noqa: E402
from torchtitan.components.checkpoint import CheckpointManager  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.optimizer import default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import TrainingConfig  # noqa: E402
from torchtitan.models.common.attention import FlexAttention  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

import sparsepretrain as sp  # noqa: E402
from sparsepretrain.integrations.torchtitan import sparse_spec  # noqa: E402


def attention(q, k, v, *, scale, **rest):
    """FlexAttention has no backward on a CPU."""
    options = {"is_causal": True, "scale": scale, "enable_gqa": True}
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)
    return y, SimpleNamespace(lse=None)


class Memory:
    device_name = "cpu"

    def get_peak_stats(self):
        return metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)

    def reset_peak_stats(self):
        pass


FlexAttention._compiled_flex_attn = staticmethod(attention)
metrics.build_device_memory_monitor = Memory
distributed.set_pg_timeouts = lambda *args, **kwargs: None  # takes the index of a device


class Bytes(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, **kwargs):
        super().__init__()
        self.eos_id = 0

    def encode(self, text, **kwargs):
        return list(text.encode())

    def decode(self, ids, **kwargs):
        return bytes(ids).decode()

    def get_vocab_size(self):
        return 2048


class Draws(BaseDataLoader):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config, *, seq_len, local_batch_size, **kwargs):
        self.shape, self.at = (local_batch_size, seq_len + 1), 0

    def __iter__(self):
        while True:
            generator = torch.Generator().manual_seed(self.at)
            self.at += 1
            tokens = torch.randint(0, 256, self.shape, generator=generator)
            positions = torch.arange(self.shape[1] - 1).expand(self.shape[0], -1)
            yield {"input": tokens[:, :-1], "positions": positions}, tokens[:, 1:]

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def train(folder, steps, method, options, *, hf):
    spec = model_registry("debugmodel", attn_backend="flex")
    spec.model.layers = spec.model.layers[:2]
    spec = sparse_spec(spec, method, targets=["*.feed_forward.*"], **options)
    config = Trainer.Config(
        model_spec=spec,
        hf_assets_path=None,
        dump_folder=folder,
        tokenizer=Bytes.Config(),
        dataloader=Draws.Config(),
        optimizer=default_adamw(lr=1e-3),
        loss=CrossEntropyLoss.Config(global_vocab_size=2048),
        training=TrainingConfig(
            local_batch_size=2, seq_len=32, steps=steps, mixed_precision_param="float32"
        ),
        metrics=MetricsProcessor.Config(log_freq=1),
        checkpoint=CheckpointManager.Config(
            enable=True, interval=2, last_save_model_only=hf, last_save_in_hf=hf
        ),
        activation_checkpoint=None,
    )
    config.optimizer.implementation = "for-loop"
    trainer = Trainer(config)
    trainer.train()
    return trainer


if __name__ == "__main__":
    folder, steps, method, options, *rest = sys.argv[1:]
    trainer = train(folder, int(steps), method, json.loads(options), hf="hf" in rest)
    (model,) = trainer.model_parts
    handle = sp.sparsifier_of(model)
    dense = handle.dense_state_dict()
    torch.save((handle.dense_state_dict(), dict(handle.masks())), f"{folder}/found.pt")
    found = {"steps": handle.completed_steps, "holds": handle.prove().holds}
    found |= {"metrics": handle.metrics(), "total": handle.method.schedule.total_steps}
    print(json.dumps(found))
