"""Pre-train GPT-2 with the Trainer of transformers; five lines are about sparsity."""

import torch
import transformers

import sparsepretrain as sp
from sparsepretrain.integrations.transformers import SparsityCallback

config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=32, n_positions=32, vocab_size=64)
model = transformers.GPT2LMHeadModel(config)
sp.sparsify(model, "sste", targets=["*.mlp.*"])
tokens = torch.randint(0, 64, (64, 16))
trainer = transformers.Trainer(
    model=model,
    args=transformers.TrainingArguments("out", max_steps=4, save_steps=2, report_to="none"),
    train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
)
SparsityCallback().add_to(trainer)
trainer.train()  # checkpoint-4 resumes; checkpoint-4/sparse is 2:4
sp.save_pretrained(trainer.model, "out/final")
