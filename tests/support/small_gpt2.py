"""GPT-2 in a plain PyTorch loop around ``sparsify``, on the bytes of this package's sources."""

import functools
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F

import sparsepretrain
from gpt2 import PlainGPT2


@functools.cache
def source_bytes():
    """Return the package's Python files as int64 byte values."""
    files = sorted(Path(sparsepretrain.__file__).parent.rglob("*.py"))
    text = b"".join(path.read_bytes() for path in files)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


class Training:
    """Model, optimizer and data; all methods have equal initial weights and batches."""

    def __init__(self, method, sizes, batch, device, *, compiled=False, lr=6e-4):
        torch.manual_seed(0)
        model = PlainGPT2(SimpleNamespace(**sizes))
        for parameter in model.parameters():
            if parameter.dim() > 1:  # as GPT-2, before the scale of S-STE is frozen
                torch.nn.init.normal_(parameter, std=0.02)
        model = model.to(device)
        targets = ["*.up", "*.down"]
        self.sparsifier = sparsepretrain.sparsify(model, method, targets=targets, total_steps=1000)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=device.type == "cuda")
        self.sparsifier.attach(self.optimizer)
        self.sparsifier.store_operands(torch.bfloat16 if device.type == "cuda" else None)
        self.model = torch.compile(model) if compiled else model
        self.batch, self.length, self.device = batch, sizes["n_positions"], device
        self.losses = []

    def step(self):
        """Take an optimizer step and read its loss."""
        generator, data = torch.Generator().manual_seed(len(self.losses)), source_bytes()
        last = data.numel() - self.length - 1
        starts = torch.randint(last, (self.batch, 1), generator=generator)
        window = data[starts + torch.arange(self.length + 1)].to(self.device)
        enabled = self.device.type == "cuda"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=enabled):
            logits = self.model(window[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(loss.item())
