"""A model with nanochat's Linear: fp32 weights that are cast to the dtype of the input."""

import torch
import torch.nn.functional as F
from torch import nn

import sparsepretrain as sp


class Linear(nn.Linear):
    """As nanochat has it, instead of autocast."""

    def forward(self, x):
        return F.linear(x, self.weight.to(dtype=x.dtype))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_fc = Linear(64, 256, bias=False)
        self.c_proj = Linear(256, 64, bias=False)

    def forward(self, x):
        return x + self.c_proj(F.relu(self.c_fc(x)).square())


model = nn.Sequential(Block(), Block())
for block in model:
    nn.init.zeros_(block.c_proj.weight)  # nanochat does; S-STE's scale is fitted again later
sparsifier = sp.sparsify(model, "sste", targets=["*.c_fc", "*.c_proj"], beta_at=5)
matrices = list(model.parameters())
muon = torch.optim.Muon(matrices, lr=0.02)
adamw = torch.optim.AdamW([nn.Parameter(torch.zeros(()))], lr=1e-3)  # of embeddings and head
sparsifier.attach(muon, adamw)
for _ in range(8):
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    (model(x) - x.roll(1, 1)).float().square().mean().backward()
    for optimizer in (muon, adamw):
        optimizer.step()
        optimizer.zero_grad()
torch.save(sparsifier.dense_state_dict(), "sparse.pt")
