"""Fine-tune with TRL's SFTTrainer; it is a Trainer of transformers."""

import datasets
import transformers
import trl
from tokenizers import Tokenizer, models, pre_tokenizers

import sparsepretrain as sp
from sparsepretrain.integrations.transformers import SparsityCallback

words = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", "two", "of", "four"])}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
tokens = transformers.PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
)
config = transformers.LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=8
)
model = transformers.LlamaForCausalLM(config)
sp.sparsify(model, "srste", targets=["*.mlp.*"])
trainer = trl.SFTTrainer(
    model=model,
    args=trl.SFTConfig("out", max_steps=4, save_steps=2, report_to="none", bf16=False),
    train_dataset=datasets.Dataset.from_dict({"text": ["two of four"] * 64}),
    processing_class=tokens,
)
SparsityCallback().add_to(trainer)
trainer.train()
