"""A loop with Accelerate; `attach` looks through its wrapper."""

import torch
from accelerate import Accelerator

import sparsepretrain as sp

accelerator = Accelerator(gradient_accumulation_steps=2)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
sparsifier = sp.sparsify(model, "tsrste", targets=["*"], total_steps=4, dense_tail=0.0)
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer = accelerator.prepare(model, optimizer)
sparsifier.attach(optimizer)  # after prepare

for _ in range(8):
    with accelerator.accumulate(model):
        x = torch.randn(32, 64, device=accelerator.device)
        accelerator.backward((model(x) - x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
accelerator.save_state("out")  # resumes with load_state
torch.save(sparsifier.dense_state_dict(), "sparse.pt")  # 2:4, for a plain model
