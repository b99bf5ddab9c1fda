"""A LightningModule that knows nothing of sparsity."""

import torch

try:
    import lightning.pytorch as lightning
except ImportError:
    import pytorch_lightning as lightning

import sparsepretrain as sp
from sparsepretrain.integrations.lightning import SparsityCallback


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 64))

    def training_step(self, batch, index):
        (x,) = batch
        return (self.net(x) - x).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


data = torch.utils.data.TensorDataset(torch.randn(32, 64))
module = Module()
sparsity = SparsityCallback("ste", targets=["net.*"])
trainer = lightning.Trainer(
    accelerator="cpu",
    max_steps=4,
    log_every_n_steps=1,
    callbacks=[sparsity],
    logger=lightning.loggers.CSVLogger("out"),
)
trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=8))
torch.save(sp.sparsifier_of(module).dense_state_dict(), "sparse.pt")
