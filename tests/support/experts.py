"""What every process of test_experts.py runs: models with banks, in a plain training loop."""

import json
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers.modeling_outputs import CausalLMOutput

import sparsepretrain as sp
from sparsepretrain.sparsity.fsdp.sharding import whole
from support.families import small_config

STEPS, MICRO_BATCHES = 4, 4


class Banked(nn.Module):
    """The FFNs of all blocks in one Parameter, as modded-nanogpt has them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 16)
        self.mlp_bank = nn.Parameter(torch.randn(4, 16, 16) / 4)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        """Return the loss as models of transformers do."""
        x = self.embedding(input_ids)
        for i in range(len(self.mlp_bank)):
            x = x + F.linear(x, self.mlp_bank[i]).relu()
        logits = F.linear(x, self.embedding.weight)[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)


def train(family: str, method: str, how: str) -> dict[str, Any]:
    """Losses, masks and dense weights of a tiny model; ``how``: alone, ddp or fsdp."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if how != "alone" else (0, 1)
    torch.manual_seed(0)
    blocks: Any = []
    if family == "bank":
        model: Any = Banked().double()
        targets = ["mlp_bank"]
    else:
        model = transformers.AutoModelForCausalLM.from_config(small_config(family)).double()
        model.set_experts_implementation("eager")  # torch groups no fp64 on CPUs
        blocks, targets = model.model.layers, ["*.experts"]
    sparsifier = sp.sparsify(model, method, targets=targets, seed=3, total_steps=STEPS)
    trained: Any = model
    if how == "fsdp":
        sparsifier.prepare_sharding()
        mesh = init_device_mesh("cpu", (world,))
        for block in blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif how == "ddp":
        trained = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sparsifier.attach(optimizer)
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(5, 40, (MICRO_BATCHES, 2, 16), generator=generator)
        total = torch.zeros((), dtype=torch.float64)
        for index in range(MICRO_BATCHES // world):
            sparsifier.micro_batch(index, rank, world)
            own = tokens[index * world + rank]
            loss = trained(input_ids=own, labels=own).loss / MICRO_BATCHES
            (loss * world).backward()  # both average over the ranks
            total += loss.detach()
        if how != "alone":
            dist.all_reduce(total)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total))
    return {
        "losses": losses,
        "masks": sparsifier.masks(),
        "state": {name: whole(value) for name, value in sparsifier.dense_state_dict().items()},
        "proof": str(sparsifier.prove()),
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = []
    for family, method, how in json.loads(sys.argv[1]):
        mine, alone = train(family, method, how), train(family, method, "alone")
        pairs = [(mine["state"][name], value) for name, value in alone["state"].items()]
        results.append(
            {
                "loss": max(
                    abs(a - b) for a, b in zip(mine["losses"], alone["losses"], strict=True)
                ),
                "state": max(float((a - b).abs().max()) for a, b in pairs),
                "masks": all(torch.equal(mine["masks"][k], v) for k, v in alone["masks"].items()),
                "proof": mine["proof"] == alone["proof"],
            }
        )
    if dist.get_rank() == 0:
        print(json.dumps(results))
    dist.destroy_process_group()
