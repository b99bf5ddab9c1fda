"""Translation runs of a fraction of a second, on a few hundred pairs of cldr_ende."""

from support.tiny_runs import TRAINING, Tiny

TINY_TRANSLATION = (
    "model=transformer_nano",
    *TRAINING,
    "data.train_pairs=300",
    "data.validation_pairs=24",
    "data.test_pairs=8",
    "data.vocab_size=400",
    "model.vocab_size=400",
    "model.d_model=32",
    "model.ffn_dim=64",
    "model.encoder_layers=1",
    "model.decoder_layers=1",
    "model.attention_heads=2",
    "task.max_tokens=256",
    "task.max_length=96",
    "task.max_decode=[0.0,4]",
    "batch.size=4",
    "batch.micro=2",
)


class TinyTranslation(Tiny):
    """:class:`Tiny` with another model, task and data."""

    def overrides(self, *more: str) -> list[str]:
        return [*TINY_TRANSLATION, f"runs_dir='{self.root / 'runs'}'", *more]
