"""Exported weights as the semi-structured tensors that a GPU multiplies."""

import json

import pytest
import torch
from torch.sparse import SparseSemiStructuredTensor

pytest.importorskip("hydra", reason="needs the installed package, hydra-core among it")
from sparsepretrain.export import load_semi_structured
from support.export_cases import export, write_run


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_loaded_model_computes_the_same(dtype, tmp_path):
    from transformers import AutoModelForCausalLM

    directory, _ = export(write_run(tmp_path, "gpt2"))
    model = load_semi_structured(directory, dtype=dtype)
    for name in json.loads((directory / "sparsity.json").read_text())["layers"]:
        assert isinstance(model.get_submodule(name).weight, SparseSemiStructuredTensor)
    dense = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).to("cuda").eval()
    tokens = torch.randint(1, 256, (2, 64), device="cuda")
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, dense(tokens).logits, rtol=0, atol=2e-2)
