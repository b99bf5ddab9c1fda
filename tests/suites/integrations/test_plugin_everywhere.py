"""A user's method with every kind of state, and no line changed elsewhere."""

import io

import pytest
import torch

import sparsepretrain as sp
from sparsepretrain import config
from sparsepretrain.config import freeze
from sparsepretrain.console import Console
from sparsepretrain.training import derive, trainer
from sparsepretrain.training.evaluation import evaluate_checkpoint
from sparsepretrain.training.schedules import resolve_steps
from support.finetune_cases import QUICK, glue
from support.tiny_runs import assert_same_run, metrics

pytestmark = pytest.mark.filterwarnings("ignore:low-rank adapters were folded")
METHOD = '''
"""Dense for three steps, then a mask of moving averages of |W|, sampled gradients and a gate."""

from dataclasses import dataclass

from sparsepretrain import kernels
from sparsepretrain.registry import register
from sparsepretrain.sparsity import Method, MethodOptions, Operand, Phase, Projection, Row


@dataclass(slots=True, kw_only=True)
class GatedOptions(MethodOptions):
    momentum: float = 0.5


@register("method", "gated")
class Gated(Method):
    Options = GatedOptions
    summary = "everything that a method can have"
    scalars = {"seen": 0}

    @property
    def sparse_row(self):
        return Row(A=self.nm("M∘W"), U=Operand("MVUE(G)", (2, 4), "tokens"))

    def phase_of(self, step):
        phase = super().phase_of(step)
        waiting = phase.training and self.scalars["seen"] < 3
        return Phase(False, True, "until it has seen three steps") if waiting else phase

    def initial_state(self, weight, layer):
        from torch.nn import Parameter

        gate = weight.new_zeros(weight.shape[1 - layer.dim])
        return {"average": weight.abs(), "gate": Parameter(gate)}

    def update_(self, weight, layer):
        layer.average.lerp_(weight.abs(), 1 - self.options.momentum)

    def project(self, weight, layer):
        mask = self.mask(layer.average, layer.dim)
        return Projection(kernels.apply_mask(weight, mask), mask)

    def wgrad_gradient(self, grad, key):
        return kernels.mvue(grad, dim=0, estimator="approximate", key=key)

    def residual(self, x, layer):
        return x.mean(-1, keepdim=True) * layer.gate

    def read_optimizer(self, optimizer):
        self.scalars = {"seen": self.schedule.step}

    def metrics(self):
        return {"seen": self.scalars["seen"]}
'''


@pytest.fixture
def configs(tmp_path):
    """The directory of its yaml."""
    (tmp_path / "gated.py").write_text(METHOD, encoding="utf-8")
    (tmp_path / "configs" / "sparsity").mkdir(parents=True)
    (tmp_path / "configs" / "sparsity" / "gated.yaml").write_text("name: gated\n")
    return tmp_path / "configs"


def run(loaded):
    out = io.StringIO()
    code = trainer.train(loaded, Console(out))
    return code, freeze.run_directory(loaded), out.getvalue()


def test_plugin_method_trains_resumes_evaluates_and_densifies(tiny, configs, stop_after):
    plugin = f"plugins=['{configs.parent / 'gated.py'}']"

    def load(where):
        words = (plugin, "sparsity=gated", "batch.micro=2", f"runs_dir='{tiny.root / where}'")
        return config.load(tiny.overrides(*words), [configs])

    code, whole, text = run(load("whole"))
    assert code == 0, text
    lines = [line for line in metrics(whole) if "lr" in line]
    assert [line["seen"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["sparse"] for line in lines] == [0, 0, 1, 1, 1, 1]
    stop_after(4)
    assert run(load("parts"))[0] == 143
    stop_after(-1)
    code, parts, text = run(load("parts"))
    assert code == 0 and "(step 4)" in text
    assert_same_run(whole, parts)

    options = {"config_dirs": [configs], "console": Console(io.StringIO())}
    assert evaluate_checkpoint(str(whole), **options)["zeros"] == 0.5

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()).double()
    sp.sparsify(model, "gated", targets="0")
    with torch.no_grad():
        model[0].sparsity.gate.copy_(torch.arange(8))
    x = torch.randn(4, 8).double()
    expected = model.eval()(x)
    with pytest.warns(sp.errors.SparsePretrainWarning, match="adapters were folded"):
        sp.densify(model)
    torch.testing.assert_close(model(x), expected)
    assert [k for k, _ in model.named_parameters()] == ["0.weight", "0.bias"]


def test_plugin_method_fine_tunes(tiny, configs):
    plugin = f"plugins=['{configs.parent / 'gated.py'}']"
    words = (plugin, "sparsity=gated", "steps=4", "checkpoint.every=4")
    code, source, text = run(config.load(tiny.overrides(*words), [configs]))
    assert code == 0, text
    overrides = [*QUICK, *glue(configs.parent), "steps=3", f"runs_dir='{tiny.root / 'tuned'}'"]
    console = Console(io.StringIO())
    loaded = resolve_steps(derive.finetuned(str(source), overrides, [configs], console))
    code, _, text = run(loaded)
    assert code == 0 and "gated), stored weights" in text
    assert loaded.sparsity.name == "gated"
