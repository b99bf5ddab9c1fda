"""timm's optimizers, schedules and averages."""

import timm
import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3

import sparsepretrain as sp

model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=10)
sparsifier = sp.sparsify(model, "srste", targets=["*.mlp.*"])
optimizer = create_optimizer_v2(model, "lookahead_adamw", lr=1e-3)
sparsifier.attach(optimizer)
average = ModelEmaV3(model, decay=0.9)
schedule = CosineLRScheduler(optimizer, t_initial=4)
for step in range(4):
    images, labels = torch.randn(8, 3, 32, 32), torch.randint(10, (8,))
    torch.nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
    optimizer.zero_grad()
    average.update(model)
    schedule.step(step)
torch.save(sp.sparsifier_of(average.module).dense_state_dict(), "sparse.pth")  # timm loads it
