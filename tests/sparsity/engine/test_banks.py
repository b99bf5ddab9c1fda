"""Banks: experts in one Parameter equal one nn.Linear per expert, whichever way they multiply."""

import copy
import json
import pickle

import pytest
import torch
import torch.nn.functional as F
import transformers
import transformers.integrations.moe  # registers an operator
from torch import nn
from torch.utils.checkpoint import checkpoint

from sparsepretrain import densify, kernels, save_pretrained, sparsifier_of, sparsify
from sparsepretrain.errors import ConfigError, SparsePretrainWarning
from sparsepretrain.export.semi_structured import mismatch
from sparsepretrain.optim import AdamS, ASTAdamW, StepAdamW
from sparsepretrain.sparsity.operand_table import WGRAD
from support.families import MOE, small_config

EXPERTS = 3
WIDTH, HIDDEN, TOKENS = 16, 24, 22
METHODS = {
    "ste": {},
    "ste 1:8": {"n": 1, "m": 8},
    "srste": {"decay": 0.02},
    "srste on weights": {"decay": 2.0, "decay_on": "weight"},
    "sste": {"mvue": "none", "gamma": 0.2},
    "sste step": {"mvue": "none", "beta_update": "step", "ste_scale": "beta"},
    "sste l1": {"mvue": "none", "beta": "l1"},
    "sste none": {"mvue": "none", "beta": "none"},
    "tsrste": {"mvue": "none", "decay": 0.02, "refresh": 2},
    "tsrste 4:8": {"n": 4, "m": 8, "mvue": "none", "decay": 0.02, "refresh": 2},
    "step": {"clipping": [0.2, 0.5]},
    "asp": {"at": 0.3},
    "slope": {},
    "bimask": {"decay": 0.02, "every": 3, "candidates": 4},
    "sdgp": {"variant": "magnitude", "scope": "group"},
    "mdgf": {},
    "sdgf": {},
    "ast": {"decay": 0.02, "refresh": 2},
    "cast": {"decay": 0.02, "refresh": 2},
    "ternary": {},
    "act24": {},
    "dense": {},
}
WAYS = ("eager", "batched", "grouped", "fallback")
"""``fallback``: what transformers calls where torch groups nothing."""


class Bank(nn.Module):
    """Two layers of experts; every way to multiply that hosts have."""

    def __init__(self, way, transposed):
        super().__init__()
        self.way = way
        self.has_gate = False  # with the next attribute: how transformers marks experts
        self.is_transposed = transposed
        up, down = (EXPERTS, HIDDEN, WIDTH), (EXPERTS, WIDTH, HIDDEN)
        shapes = [(s[0], s[2], s[1]) if transposed else s for s in (up, down)]
        self.up_proj = nn.Parameter(torch.randn(shapes[0]) / 4)
        self.down_proj = nn.Parameter(torch.randn(shapes[1]) / 4)

    def forward(self, x, chosen):
        if self.way == "batched":
            return self._batched(
                self._batched(x, self.up_proj[chosen]).relu(), self.down_proj[chosen]
            )
        if self.way in ("grouped", "fallback"):
            order = chosen.argsort(stable=True)
            offs = chosen.bincount(minlength=EXPERTS).cumsum(0).to(torch.int32)
            hidden = self._grouped(x[order], self.up_proj, offs).relu()
            return self._grouped(hidden, self.down_proj, offs)[order.argsort()]
        y = torch.zeros_like(x)
        for expert in chosen.unique():
            tokens = torch.where(chosen == expert)[0]
            hidden = self._one(x[tokens], self.up_proj[expert]).relu()
            y = y.index_add(0, tokens, self._one(hidden, self.down_proj[expert]).to(y.dtype))
        return y

    def _one(self, x, weight):
        return x @ weight if self.is_transposed else F.linear(x, weight)

    def _batched(self, x, weight):
        if self.is_transposed:
            return torch.bmm(x.unsqueeze(1), weight).squeeze(1)
        return torch.bmm(weight, x.unsqueeze(-1)).squeeze(-1)

    def _grouped(self, x, weight, offs):
        weight = weight if self.is_transposed else weight.transpose(-2, -1)
        if self.way == "fallback":
            return torch.ops.transformers.grouped_mm_fallback(x, weight, offs=offs)
        return F.grouped_mm(x, weight, offs=offs)


class Separate(nn.Module):
    """The same with an nn.Linear for each expert."""

    def __init__(self, bank):
        super().__init__()
        self.up_proj, self.down_proj = (
            self._linears(bank, w) for w in (bank.up_proj, bank.down_proj)
        )

    def _linears(self, bank, weights):
        linears = nn.ModuleList()
        for weight in weights.detach():
            weight = weight.t() if bank.is_transposed else weight
            linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            linear.weight = nn.Parameter(weight.clone().contiguous())
            linears.append(linear)
        return linears

    def forward(self, x, chosen):
        y = torch.zeros_like(x)
        for expert in chosen.unique():
            tokens = torch.where(chosen == expert)[0]
            y = y.index_add(
                0, tokens, self.down_proj[expert](self.up_proj[expert](x[tokens]).relu())
            )
        return y

    def weights(self, transposed):
        """Weights and gradients, as the bank stores them."""
        return [
            [torch.stack([pick(t, transposed) for t in kind]) for kind in each]
            for each in (
                [[e.weight.detach() for e in es] for es in (self.up_proj, self.down_proj)],
                [[grad(e.weight) for e in es] for es in (self.up_proj, self.down_proj)],
            )
        ]


def pick(tensor, transposed):
    return tensor.t() if transposed else tensor


def grad(weight):
    return torch.zeros_like(weight) if weight.grad is None else weight.grad.clone()


class Net(nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.experts = experts

    def forward(self, x, chosen):
        return x + self.experts(x, chosen)


def pair(way="eager", transposed=False, dtype=torch.float64):
    torch.manual_seed(0)
    bank = Bank(way, transposed)
    return Net(bank).to(dtype), Net(Separate(bank)).to(dtype)


def options_of(name):
    method = name.split()[0]
    return method, {"total_steps": 10, "seed": 3, **METHODS[name]}


def optimizer_of(method, model):
    parameters = [p for p in model.parameters() if p.requires_grad]
    if method == "step":
        return StepAdamW(parameters, 1e-2, clipping=(2, 5))
    kind = {"ast": ASTAdamW, "cast": AdamS}.get(method, torch.optim.AdamW)
    return kind(parameters, lr=1e-2)


def batch(step, dtype=torch.float64):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(TOKENS, WIDTH, generator=generator, dtype=dtype)
    chosen = torch.randint(0, EXPERTS - (step % 2), (TOKENS,), generator=generator)
    return x, chosen  # in odd steps the last expert gets no token


def train(model, optimizer, steps, first=0):
    losses = []
    for step in range(first, first + steps):
        x, chosen = batch(step, next(model.parameters()).dtype)
        loss = (model(x, chosen) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("transposed", [False, True], ids=["out_in", "in_out"])
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.filterwarnings("ignore:StepAdamW switched")
def test_a_bank_equals_one_linear_layer_per_expert(name, transposed, monkeypatch):
    # of layers the draws differ: the same candidates for all
    drawn = torch.rand(4, WIDTH + HIDDEN, generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr(
        kernels, "uniform_noise", lambda key, count, size, *_: drawn[None, :count, :size]
    )
    method, options = options_of(name)
    if transposed and method == "cast":
        with pytest.raises(ConfigError, match="cast supports linear, bank, not transposed bank"):
            sparsify(pair(transposed=True)[0], method, targets="*experts*", **options)
        return
    bank, separate = pair(transposed=transposed)
    found = sparsify(bank, method, targets="*experts*", **options)
    expected = sparsify(separate, method, targets="*_proj*", **options)
    optimizers = [optimizer_of(method, model) for model in (bank, separate)]
    found.attach(optimizers[0])
    expected.attach(optimizers[1])
    for step in range(10):
        x, chosen = batch(step)
        losses = []
        for model, optimizer in zip((bank, separate), optimizers, strict=True):
            optimizer.zero_grad()
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)
            loss = (model(x, chosen) - 1).square().mean()
            loss.backward()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=1e-12)
        gradients = separate.experts.weights(transposed)[1]
        for own, other in zip(
            (bank.experts.up_proj, bank.experts.down_proj), gradients, strict=True
        ):
            torch.testing.assert_close(own.grad, other, rtol=1e-12, atol=1e-14)
        for optimizer in optimizers:
            optimizer.step()
    weights = separate.experts.weights(transposed)[0]
    for own, other in zip((bank.experts.up_proj, bank.experts.down_proj), weights, strict=True):
        torch.testing.assert_close(own.detach(), other, rtol=1e-11, atol=1e-13)
    masks, others = found.masks(), expected.masks()
    for key in ("up_proj", "down_proj"):
        each = [pick(others[f"experts.{key}.{e}"], transposed) for e in range(EXPERTS)]
        assert torch.equal(masks[f"experts.{key}"], torch.stack(each))
    assert found.flips is None or found.flips.sum() == expected.flips.sum()
    numbers, others = found.metrics(), expected.metrics()
    assert numbers == pytest.approx(others, rel=1e-9)
    assert found.prove().holds is expected.prove().holds
    assert (found.prove().zeros, found.prove().groups) == (
        expected.prove().zeros,
        expected.prove().groups,
    )
    densify(bank)
    densify(separate)
    torch.testing.assert_close(bank(*batch(1)), separate(*batch(1)), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("name", "transposed"),
    [
        (name, transposed)
        for name in (*METHODS, "sste mvue", "tsrste mvue")
        for transposed in (False, True)
        if (name, transposed) != ("cast", True)  # refused, see above
    ],
)
@pytest.mark.filterwarnings("ignore:StepAdamW switched")
def test_all_ways_to_multiply_are_equal(name, transposed):
    method, options = (
        (name.split()[0], {"total_steps": 10}) if name.endswith("mvue") else options_of(name)
    )
    losses = []
    for way in WAYS:
        model = pair(way, transposed, torch.float32)[0]  # torch groups no fp64 on CPUs
        sparsifier = sparsify(model, method, targets="*experts*", **options)
        optimizer = optimizer_of(method, model)
        sparsifier.attach(optimizer)
        losses.append(train(model, optimizer, 4))
    assert losses[0] == pytest.approx(losses[1], rel=2e-5)
    assert losses[0] == pytest.approx(losses[2], rel=2e-5)
    assert losses[0] == pytest.approx(losses[3], rel=2e-5)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("transposed", [False, True], ids=["out_in", "in_out"])
@pytest.mark.parametrize(("n", "m"), [(2, 4), (4, 8), (1, 4)])
def test_the_estimate_of_an_expert_is_drawn_from_its_own_tokens(way, transposed, n, m):
    model = pair(way, transposed, torch.float32)[0]
    sparsifier = sparsify(model, "sste", targets="*down*", n=n, m=m, seed=5)
    seen = {}
    model.experts.down_proj.register_hook(lambda g: seen.update(dw=g.clone()))
    x, chosen = batch(0, torch.float32)
    hidden = {}
    exact = copy.deepcopy(model)
    densify(exact)
    up = exact.experts.up_proj.detach()
    y = model(x, chosen)
    upstream = torch.randn_like(y)
    y.backward(upstream)
    state = sparsifier.layers["experts.down_proj"].sparsity
    for expert in range(EXPERTS):
        tokens = torch.where(chosen == expert)[0]
        hidden = (x[tokens] @ up[expert] if transposed else F.linear(x[tokens], up[expert])).relu()
        g = upstream[tokens]
        groups = -(-len(tokens) // m)
        key = state.key_at((0, 0), WGRAD, groups, per=4, call=expert)
        rows = F.pad(g, (0, 0, 0, -len(tokens) % m))
        estimate = kernels.mvue(rows, n, m, dim=0, key=key)[: len(tokens)]
        expected = hidden.t() @ estimate if transposed else estimate.t() @ hidden
        torch.testing.assert_close(seen["dw"][expert], expected, rtol=1e-4, atol=1e-5)


def test_the_mean_of_the_estimates_is_the_gradient():
    model = pair(dtype=torch.float32)[0]
    gradients = []
    for seed in range(600):
        trained = copy.deepcopy(model)
        sparsify(trained, "sste", targets="*experts*", seed=seed)
        trained(*batch(0, torch.float32)).square().sum().backward()
        gradients.append(trained.experts.down_proj.grad)
    exact = copy.deepcopy(model)
    sparsify(exact, "sste", targets="*experts*", mvue="none")
    exact(*batch(0, torch.float32)).square().sum().backward()
    drawn = torch.stack(gradients).double()
    error = (drawn.mean(0) - exact.experts.down_proj.grad).abs()
    assert (error <= 5 * drawn.std(0) / len(drawn) ** 0.5 + 1e-5).all()


def test_draws_differ_between_micro_batches_and_not_under_recomputation():
    model = pair(dtype=torch.float32)[0]
    sparsifier = sparsify(model, "sste", targets="*experts*")
    inputs = batch(0, torch.float32)

    def gradient(index, function):
        model.zero_grad()
        sparsifier.micro_batch(index)
        function(*inputs).square().sum().backward()
        return model.experts.up_proj.grad.clone()

    first = gradient(0, model)
    assert torch.equal(first, gradient(0, model))
    assert not torch.equal(first, gradient(1, model))
    recomputed = gradient(0, lambda *each: checkpoint(model, *each, use_reentrant=False))
    assert torch.equal(first, recomputed)


@pytest.mark.parametrize("name", ["srste", "sste", "tsrste", "step", "asp", "slope", "ast", "cast"])
@pytest.mark.filterwarnings("ignore:StepAdamW switched")
def test_resume_is_bit_exact(name):
    method, options = options_of(name)
    options |= {"mvue": "gradient"} if "mvue" in options else {}
    model = pair(dtype=torch.float32)[0]
    optimizer = optimizer_of_sparse(model, method, options)
    train(model, optimizer, 4)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    expected = train(model, optimizer, 4, first=4)
    other = pair(dtype=torch.float32)[0]
    with torch.no_grad():
        other.experts.up_proj.mul_(-1)
    optimizer = optimizer_of_sparse(other, method, options)
    other.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert train(other, optimizer, 4, first=4) == expected
    assert all(
        torch.equal(a, b)
        for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True)
    )


def optimizer_of_sparse(model, method, options):
    sparsifier = sparsify(model, method, targets="*experts*", **options)
    optimizer = optimizer_of(method, model)
    sparsifier.attach(optimizer)
    return optimizer


@pytest.mark.parametrize("store", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_copies_pickles_stored_operands_and_autocast(store, dtype):
    model = pair(dtype=torch.float32)[0]
    sparsifier = sparsify(model, "sste", targets="*experts*", mvue="none")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sparsifier.attach(optimizer)
    if store:
        sparsifier.store_operands(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
        train(model, optimizer, 2)
        model.eval()
        expected = model(*batch(0, torch.float32))
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(other(*batch(0, torch.float32)), expected)
            assert other.experts.up_proj is not model.experts.up_proj
            assert torch.equal(densify(other)(*batch(0, torch.float32)), expected)
            assert type(other.experts) is Bank


def test_outside_its_forward_the_module_has_its_parameters():
    model, _ = pair()
    before = dict(model.named_parameters())
    names = list(model.state_dict())
    sparsifier = sparsify(model, "srste", targets="*experts*")
    assert dict(model.named_parameters()) == before
    assert model.experts.up_proj is before["experts.up_proj"]
    assert [key for key in model.state_dict() if "spars" not in key] == names
    assert list(sparsifier.layers) == ["experts.up_proj", "experts.down_proj"]
    state = sparsifier.dense_state_dict()
    assert list(state) == names
    stock, _ = pair()
    stock.load_state_dict(state)
    assert torch.equal(stock(*batch(0)), model.eval()(*batch(0)))
    found = state["experts.up_proj"]
    assert torch.equal(found, found * kernels.nm_mask(found, dim=2))
    assert sparsifier_of(model).layers == sparsifier.layers


def test_loading_initial_weights_computes_the_state_again():
    model, _ = pair()
    other, _ = pair()
    with torch.no_grad():
        other.experts.up_proj.copy_(torch.randn_like(other.experts.up_proj))
    expected = sparsify(copy.deepcopy(other), "slope", targets="*experts*").masks()
    sparsifier = sparsify(model, "slope", targets="*experts*")
    model.load_state_dict(other.state_dict(), strict=False)
    assert torch.equal(sparsifier.masks()["experts.up_proj"], expected["experts.up_proj"])
    with torch.device("meta"):
        empty = Net(Bank("eager", False)).double()
    sparsifier = sparsify(empty, "slope", targets="*experts*")
    empty.to_empty(device="cpu")
    empty.load_state_dict(other.state_dict(), strict=False)
    assert torch.equal(sparsifier.masks()["experts.up_proj"], expected["experts.up_proj"])


def test_fixed_masks_may_come_from_outside():
    model, _ = pair()
    sparsifier = sparsify(model, "asp", targets="*experts*", at=0, total_steps=4)
    masks = {
        name: kernels.nm_mask(torch.rand(bank.weight.shape))
        for name, bank in sparsifier.layers.items()
    }
    sparsifier.keep_masks(masks)
    found = sparsifier.masks()
    assert all(torch.equal(found[name], masks[name]) for name in masks)
    sparsifier.store_operands()
    sparsifier.hold({name: mask.flip(-1) for name, mask in masks.items()})
    held = model(*batch(0))
    sparsifier.refresh()
    assert not torch.equal(held, model(*batch(0)))


def test_the_record_has_numbers_of_each_expert():
    model, _ = pair()
    sparsifier = sparsify(model, "srste", targets="*experts*")
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    sparsifier.attach(optimizer)
    before = sparsifier.masks()["experts.up_proj"]
    train(model, optimizer, 1, first=1)  # the last expert gets no token
    after = sparsifier.masks()["experts.up_proj"]
    numbers = sparsifier.metrics(per_layer=True)
    assert "flip_rate/experts.up_proj" in numbers
    for expert in range(EXPERTS):
        rate = (before[expert] != after[expert]).double().mean().item()
        assert numbers[f"flip_rate/experts.up_proj/{expert}"] == pytest.approx(rate)
        assert numbers[f"density/experts.up_proj/{expert}"] == 0.5
    assert numbers[f"flip_rate/experts.up_proj/{EXPERTS - 1}"] == 0
    assert numbers["flip_rate/experts.up_proj/0"] > 0


class Named(nn.Module):
    """A bank of no known class."""

    def __init__(self, shape=(2, 8, 8), read=lambda x, bank: F.linear(x, bank[0])):
        super().__init__()
        self.mlp_bank = nn.Parameter(torch.randn(shape))
        self.proj = nn.Linear(8, 8)
        self.read = read

    def forward(self, x):
        return self.proj(self.read(x, self.mlp_bank))


def test_a_bank_of_the_root_is_made_sparse_by_its_name():
    model = Named((2, 3, 8, 8), lambda x, bank: F.linear(x, bank[1][2]) @ bank[0, 0].T)
    sparsifier = sparsify(model, "sste", targets=["mlp_bank"])
    assert list(sparsifier.layers) == ["mlp_bank"]
    x = torch.randn(4, 8)
    weights = sparsifier.dense_state_dict()["mlp_bank"]
    expected = model.proj(F.linear(x, weights[1, 2]) @ weights[0, 0].T)
    torch.testing.assert_close(model(x), expected)
    model(x).sum().backward()
    assert model.mlp_bank.grad[1, 2].any() and not model.mlp_bank.grad[1, 1].any()
    with pytest.warns(SparsePretrainWarning, match=r"mlp_bank \(2, 8, 8\) of Named"):
        assert list(sparsify(Named(), "ste", targets="*").layers) == ["proj"]


def each(x, bank):
    """Return the product with every slice, of all tokens or of those of that slice."""
    inputs = x if x.dim() == 3 and len(x) == EXPERTS else [x] * EXPERTS
    return torch.stack([F.linear(inputs[i], bank[i]) for i in range(EXPERTS)])


OF_EACH = (EXPERTS, TOKENS, WIDTH)
EQUATIONS = {
    "sti,soi->sto": (OF_EACH, each),
    "sti,soi->tos": (OF_EACH, lambda x, bank: each(x, bank).permute(1, 2, 0)),
    "ti,soi->sto": ((TOKENS, WIDTH), each),
    "i,soi->os": ((WIDTH,), lambda x, bank: each(x[None], bank)[:, 0].T),
    "b t i, s o i -> b s t o": ((2, 8, WIDTH), lambda x, bank: each(x, bank).transpose(0, 1)),
    "...i,soi->s...o": ((2, 1, 8, WIDTH), each),
    "...i,...oi->...o": ((EXPERTS, WIDTH), lambda x, bank: each(x[:, None], bank)[:, 0]),
    # summed over the slices too; without an arrow the labels that occur once, o and t
    "sti,soi->to": (OF_EACH, lambda x, bank: each(x, bank).sum(0)),
    "sti,soi": (OF_EACH, lambda x, bank: each(x, bank).sum(0).T),
}


class Reader(nn.Module):
    """A bank of no known class, of slices (out, in), or (in, out) if it says so."""

    def __init__(self, read, transposed):
        super().__init__()
        self.is_transposed, self.has_gate = transposed, False
        weight = torch.randn(EXPERTS, HIDDEN, WIDTH, dtype=torch.float64)
        self.bank = nn.Parameter(weight.mT.contiguous() if transposed else weight)
        self.read = read

    def forward(self, x):
        return self.read(x, self.bank)


def trained_alike(name, shape, transposed, *reads):
    """Require equal results and gradients of two ways to read a bank."""
    found = []
    for read in reads:
        torch.manual_seed(0)
        model = Reader(read, transposed)
        sparsify(model, name, targets=["bank"], total_steps=12, **METHODS[name])
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        y = model(x)
        (y * torch.randn(y.shape, dtype=torch.float64)).sum().backward()
        found.append((y, x.grad, model.bank.grad))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", ["srste", "slope", "act24", "tsrste"])
@pytest.mark.parametrize("text", EQUATIONS)
def test_einsum_multiplies_tokens_by_slices(text, name, transposed):
    """As F.linear does with each slice; the bank is named first or last."""
    shape, expected = EQUATIONS[text]
    x_labels, _, rest = text.partition(",")
    bank_labels, arrow, result = rest.partition("->")
    if transposed:
        bank_labels = bank_labels.replace("oi", "io").replace("o i", "i o")
    turned = f"{bank_labels},{x_labels}{arrow}{result}"
    trained_alike(
        *(name, shape, transposed),
        lambda x, bank: torch.einsum(turned, bank, x),
        lambda x, bank: expected(x, bank.mT if transposed else bank),
    )


@pytest.mark.parametrize("name", ["srste", "act24", "tsrste"])
def test_einsum_multiplies_by_chosen_slices(name):
    chosen = torch.arange(TOKENS) % EXPERTS
    back = chosen.argsort(stable=True).argsort()

    def by_slice(x, bank):
        return torch.cat([F.linear(x[chosen.eq(i)], bank[i]) for i in range(EXPERTS)])[back]

    for read in (
        lambda x, bank: torch.einsum("ti,toi->to", x, bank[chosen]),
        lambda x, bank: torch.einsum("ti,toi->to", [x, bank[chosen]]),
    ):
        trained_alike(name, (TOKENS, WIDTH), False, read, by_slice)
    trained_alike(
        *(name, (2, 8, WIDTH), False),
        lambda x, bank: torch.einsum("...i,oi->o...", x, bank[1]),
        lambda x, bank: F.linear(x, bank[1]).movedim(-1, 0),
    )


def one_by_one(slices):
    return lambda x, bank: sum(F.linear(x, each) for each in slices(bank))


@pytest.mark.parametrize("name", ["srste", "slope", "act24", "tsrste"])
@pytest.mark.parametrize(
    "slices",
    [
        list,
        lambda bank: bank.unbind(),
        lambda bank: torch.unbind(bank, dim=-3),
        lambda bank: [each for part in bank.chunk(2) for each in part],
        lambda bank: [part[0] for part in torch.split(bank, 1, dim=0)],
        lambda bank: [each for part in bank.split([1, EXPERTS - 1]) for each in part],
        lambda bank: [each for part in bank.tensor_split(2, -3) for each in part],
        lambda bank: [bank.select(0, index) for index in range(EXPERTS)],
        lambda bank: [bank.narrow(0, index, 1)[0] for index in range(EXPERTS)],
        lambda bank: torch.index_select(bank, dim=0, index=torch.arange(EXPERTS)),
        lambda bank: [each.T.T for each in bank],
    ],
)
def test_slices_are_taken_in_all_ways_of_torch(name, slices):
    by_index = one_by_one(lambda bank: [bank[index] for index in range(EXPERTS)])
    trained_alike(name, (TOKENS, WIDTH), False, one_by_one(slices), by_index)


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda x, bank: sum(x @ each for each in bank), "sums over the other axis"),
        (lambda x, bank: x @ bank.unbind()[0], "sums over the other axis"),
        (lambda x, bank: sum(F.linear(x, part) for part in bank[0].chunk(2)), "is read by chunk"),
        (lambda x, bank: F.linear(x, torch.cat([bank[0], bank[1]])), "is read by cat"),
        (lambda x, bank: F.linear(x, torch.stack([bank[0]])[0]), "is read by stack"),
        (lambda x, bank: torch.linalg.multi_dot([x, bank[0].T]), "is read by linalg_multi_dot"),
        (lambda x, bank: F.linear(x, torch.cat(tensors=(bank[0],))), "is read by cat"),
        (lambda x, bank: x @ bank[0], r"'mlp_bank' \(2, 8, 8\) .* sums over the other axis"),
        (lambda x, bank: F.linear(x, bank[0].t()), "sums over the other axis"),
        (lambda x, bank: torch.einsum("ti,io->to", x, bank[0]), "einsum .* sums over the other"),
        (lambda x, bank: torch.einsum("ti,eoi->to", x, bank), "is read by einsum 'ti,eoi->to'"),
        (lambda x, bank: torch.einsum("ti,oi->t", x, bank[0])[:, None], "is read by einsum"),
        (lambda x, bank: torch.einsum("ti,ii->ti", x, bank[0]), "is read by einsum 'ti,ii->ti'"),
        (lambda x, bank: torch.einsum("ti,oi->tio", x, bank[0])[:, 0], "is read by einsum"),
        (lambda x, bank: torch.einsum("eio,eoi->oi", bank, bank), "is read by einsum"),
        (lambda x, bank: F.linear(x, bank.sum(0)), "is read by sum"),
        (lambda x, bank: F.linear(x, bank[:, 0]), "is read by __getitem__"),
        (lambda x, bank: F.conv1d(x.t()[None], bank[..., :1])[0].t(), "is read by __getitem__"),
    ],
)
def test_other_reads_of_an_unknown_bank_are_refused(read, message):
    model = Named(read=read)
    sparsify(model, "ste", targets=["mlp_bank"])
    with pytest.raises(ConfigError, match=message):
        model(torch.randn(4, 8))


def test_what_cannot_be_a_bank_is_refused():
    odd = Net(Bank("eager", False))
    odd.experts.up_proj = nn.Parameter(torch.randn(3, 24, 14))
    with pytest.raises(ConfigError, match=r"experts.up_proj.*in_features = 14 is not a multiple"):
        sparsify(odd, "ste", targets="*experts*")
    model, _ = pair()
    with pytest.raises(ConfigError, match=r"bank 'experts.up_proj' has no fp8"):
        sparsify(model, "ste", targets="*experts*", precision="fp8_sim")
    sparsify(model, "ste", targets="*experts*")
    with pytest.raises(ConfigError, match="sparse already"):
        sparsify(model, "ste", targets="*experts*")
    strided = Named()
    strided.mlp_bank = nn.Parameter(torch.randn(8, 8, 2).permute(2, 0, 1))
    with pytest.raises(ConfigError, match="not contiguous"):
        sparsify(strided, "ste", targets="mlp_bank")
    convolution = nn.Sequential(nn.Conv1d(8, 8, 4), nn.Linear(8, 8))
    with pytest.raises(ConfigError, match="cannot be sparse"):
        sparsify(convolution, "ste", targets=["0"])


def test_experts_are_left_out_by_either_name():
    for words in (["*experts*", "!experts.up_proj"], ["*experts*", "!*up*"]):
        model, _ = pair()
        assert list(sparsify(model, "ste", targets=words).layers) == ["experts.down_proj"]
    model, _ = pair()
    sparsify(model, "ste", targets="*")
    densify(model)
    assert type(model.experts) is Bank


HOSTS = [*MOE, "gpt_oss", "llama4_text"]


@pytest.mark.parametrize("family", HOSTS)
@pytest.mark.parametrize("method", ["srste", "sste"])
def test_experts_of_transformers_train_and_are_saved_for_stock_classes(family, method):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(small_config(family))
    stock = copy.deepcopy(model).eval()
    names = [name for name, p in model.named_parameters() if ".experts." in name and p.dim() == 3]
    sparsifier = sparsify(model, method, targets=["*.experts*"])
    assert names and sorted(sparsifier.layers) == sorted(names)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    sparsifier.attach(optimizer)
    tokens = torch.arange(24).view(2, 12) % 7 + 5
    for _ in range(2):
        model(input_ids=tokens, labels=tokens).loss.backward()
        assert all(model.get_parameter(name).grad.any() for name in names)
        optimizer.step()
        optimizer.zero_grad()
    assert sparsifier.prove().holds and sparsifier.metrics()["density"] == 0.5
    stock.load_state_dict(sparsifier.dense_state_dict())
    expected = model.eval()(input_ids=tokens).logits
    torch.testing.assert_close(stock(input_ids=tokens).logits, expected)
    dims = {name: sparsifier.layers[name].in_dim - 2 for name in names}
    for name, dim in dims.items():
        weight = stock.get_parameter(name)
        assert torch.equal(weight, weight * kernels.nm_mask(weight, dim=dim))
    transposed = family in ("gpt_oss", "llama4_text")
    assert set(dims.values()) == {-2 if transposed else -1}


@pytest.mark.parametrize("method", ["srste", "sste"])
def test_implementations_of_transformers_agree(method):
    losses = {}
    for implementation in ("eager", "batched_mm", "grouped_mm"):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(small_config("qwen3_moe"))
        model.set_experts_implementation(implementation)
        sparsifier = sparsify(
            model, method, targets=["*.experts*"], **({"mvue": "none"} if method == "sste" else {})
        )
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        sparsifier.attach(optimizer)
        losses[implementation] = []
        for step in range(3):
            tokens = torch.arange(24).view(2, 12) % (7 + step) + 5
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[implementation].append(loss.item())
    assert losses["batched_mm"] == pytest.approx(losses["eager"], rel=1e-5)
    assert losses["grouped_mm"] == pytest.approx(losses["eager"], rel=1e-5)


def test_save_pretrained_names_the_banks(tmp_path):
    model = transformers.AutoModelForCausalLM.from_config(small_config("mixtral"))
    sparsifier = sparsify(model, "srste", targets=["*.experts"])
    save_pretrained(model, tmp_path)
    about = json.loads((tmp_path / "sparsity.json").read_text())
    assert about["layers"] == list(sparsifier.layers) and about["pattern"] == "2:4"
    assert "is a bank of experts" in mismatch(model, about["layers"])


class Steps(nn.Module):
    """Reads a bank in parts of its forward, under ``way``."""

    def __init__(self, way=lambda function, *args: function(*args)):
        super().__init__()
        self.bank = nn.Parameter(torch.linspace(-1, 1, 3 * 64).sin().view(3, 8, 8))
        self.way = way

    def step(self, x, index):
        return F.linear(x, self.bank[index]).tanh()

    def forward(self, x):
        for index in range(3):
            x = self.way(self.step, x, index)
        return x


DRAWN_ONCE = {"mvue": "none"}
"""S-STE without draws, which a recomputation of parts of a forward repeats."""


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("ste", {}),
        ("sste", DRAWN_ONCE),
        ("sste", DRAWN_ONCE | {"ste_scale": "beta"}),  # saves a factor with the read
        ("maskllm", {"total_steps": 10}),  # saves what its masks are computed from
        ("cast", {"total_steps": 10}),
    ],
)
@pytest.mark.parametrize("reentrant", [False, True])
def test_parts_of_a_forward_are_recomputed_with_the_projection(method, options, reentrant):
    found = []
    for way in (
        lambda function, *args: function(*args),
        lambda function, *args: checkpoint(function, *args, use_reentrant=reentrant),
    ):
        model = nn.Sequential(Steps(way))
        sparsify(model, method, targets="*bank", **options)
        x = torch.ones(4, 8, requires_grad=True)
        model(x).sum().backward()
        found.append([x.grad, *(p.grad for p in model.parameters() if p.requires_grad)])
    torch.testing.assert_close(found[0], found[1])


def test_a_backward_after_the_weights_were_changed_is_refused():
    """As torch refuses it where no hooks look at what the graph saves."""
    model = nn.Sequential(Steps())
    sparsify(model, "sste", targets="*bank", **DRAWN_ONCE, ste_scale="beta", beta_update="step")
    y = model(torch.ones(4, 8))
    saved = [
        tensor
        for bank in model[0].sparse_banks.children()
        for tensor in bank.sparsity.buffers()
        if tensor.is_floating_point()
    ]
    assert saved
    with torch.no_grad():
        for tensor in saved:
            tensor.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an in-place operation"):
        y.sum().backward()


@pytest.mark.parametrize("method", ["ste", "sste"])
def test_a_part_without_gradients_or_autocast_does_not_decide_for_the_others(method):
    model = nn.Sequential(Steps())

    def measured(function, x, index):
        with torch.no_grad():
            scale = function(x, index).std()
        with torch.autocast("cpu", torch.bfloat16):
            function(x, index)
        return function(x, index) / scale

    model[0].way = measured
    sparsify(model, method, targets="*bank")
    y = model(torch.randn(4, 8))
    y.sum().backward()
    assert y.dtype == torch.float32 and model[0].bank.grad.any()


def test_a_module_that_does_not_read_its_bank_itself_is_refused():
    lists = nn.Sequential(nn.Linear(8, 8))
    lists.banks = nn.ParameterList([torch.randn(2, 8, 8)])
    with pytest.raises(ConfigError, match="cannot be sparse"):
        sparsify(lists, "ste", targets="banks*")
    model, _ = pair()
    forward = model.experts.forward
    model.experts.forward = lambda *args: forward(*args)
    with pytest.raises(ConfigError, match="forward of its module's own object"):
        sparsify(model, "ste", targets="*experts*")


def test_a_bank_that_its_parent_reads_too_is_named():
    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            self.steps = Steps()

        def forward(self, x):
            return self.steps(x) + F.linear(x, self.steps.bank[0])

    model = Parent()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    sparsify(model, "ste", targets="*bank").attach(optimizer)
    model(torch.randn(4, 8)).sum().backward()
    with pytest.warns(SparsePretrainWarning, match="'steps.bank' has a gradient that its forward"):
        optimizer.step()


@pytest.mark.parametrize("method", ["ste", "cast"])
@pytest.mark.filterwarnings("error")
def test_a_bank_that_only_its_module_reads_is_not(method):
    model = nn.Sequential(Steps())
    optimizer = optimizer_of_sparse_bank(model, method)
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()


def optimizer_of_sparse_bank(model, method):
    sparsifier = sparsify(model, method, targets="*bank", total_steps=4)
    optimizer = optimizer_of(method, model)
    sparsifier.attach(optimizer)
    return optimizer


def test_one_expert_is_a_bank_too_and_any_name_serves():
    model = Net(Bank("eager", False))
    model.experts.up_proj = nn.Parameter(torch.randn(1, HIDDEN, WIDTH))
    assert list(sparsify(model, "sste", targets="*").layers) == [
        "experts.up_proj",
        "experts.down_proj",
    ]
    named = nn.Sequential(Steps())
    named[0].register_parameter("keys", nn.Parameter(torch.randn(2, 8, 8)))
    assert list(sparsify(named, "ste", targets=["*.keys"]).layers) == ["0.keys"]
    assert type(named[0]).__name__ == "Steps" and "SparseSteps" in str(named)


@pytest.mark.parametrize("method", ["ste", "sste"])
@pytest.mark.parametrize(
    "read",
    [
        lambda x, bank: F.linear(input=x, weight=bank[0]),
        lambda x, bank: F.linear(x, bias=torch.zeros(8), weight=bank[0]),
        lambda x, bank: torch.matmul(input=x, other=bank[0].mT),
        lambda x, bank: torch.bmm(input=x[None], mat2=bank[:1].mT)[0],
    ],
)
def test_operands_may_be_named(method, read):
    model = Named(read=read)
    sparsifier = sparsify(model, method, targets=["mlp_bank"])
    x = torch.randn(4, 8)
    weight = sparsifier.dense_state_dict()["mlp_bank"][0]
    torch.testing.assert_close(model(x), model.proj(F.linear(x, weight)))


@pytest.mark.parametrize(("method", "options"), [("ste", {}), ("sste", {"mvue": "none"})])
@pytest.mark.parametrize(
    "multiply",
    [
        lambda x, bank: x @ bank.mT,
        lambda x, bank: x[None] @ bank.mT,
        lambda x, bank: x.expand(5, 1, 4, 8) @ bank.mT,
        lambda x, bank: x[None].expand(2, -1, -1) @ bank[1].mT,
        lambda x, bank: (bank @ x.mT).mT,
        lambda x, bank: (bank[:1] @ x.expand(3, 4, 8).mT).mT,
    ],
)
def test_leading_axes_broadcast(method, options, multiply):
    """All tokens go to all slices, as in layers that weight the outputs of all experts."""
    model = Named(read=lambda x, bank: multiply(x, bank).flatten(0, -3).sum(0))
    sparsifier = sparsify(model, method, targets=["mlp_bank"], **options)
    x = torch.randn(4, 8, requires_grad=True)
    bank = sparsifier.dense_state_dict()["mlp_bank"].requires_grad_()
    y = multiply(x, bank).flatten(0, -3).sum(0)
    loss = model(x)
    torch.testing.assert_close(loss, model.proj(y))
    upstream = torch.randn_like(loss)
    expected = torch.autograd.grad(model.proj(y), (x, bank), upstream)
    found = torch.autograd.grad(loss, (x, model.mlp_bank), upstream)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_linear_takes_one_slice():
    model = Named(read=F.linear)
    sparsify(model, "sste", targets=["mlp_bank"])
    with pytest.raises(ConfigError, match="is read by linear with several slices"):
        model(torch.randn(2, 4, 8))


def test_a_wrong_axis_is_found_in_a_dense_phase_too():
    model = Named(read=lambda x, bank: x @ bank[0])
    sparsify(model, "asp", targets=["mlp_bank"], at=0.5, total_steps=6)
    with pytest.raises(ConfigError, match="sums over the other axis"):
        model(torch.randn(4, 8))


@pytest.mark.parametrize("way", WAYS)
def test_no_tokens_at_all(way):
    model = pair(way, dtype=torch.float32)[0]
    sparsify(model, "sste", targets="*experts*")
    y = model(torch.zeros(0, WIDTH), torch.zeros(0, dtype=torch.int64))
    assert y.shape == (0, WIDTH)


def test_calls_for_single_projections_keep_what_is_known_of_the_class():
    model = transformers.AutoModelForCausalLM.from_config(small_config("llama4_text"))
    first = sparsify(model, "srste", targets=["*.experts.gate_up_proj"])
    second = sparsify(model, "srste", targets=["*.experts.down_proj"])
    banks = [*first.layers.values(), *second.layers.values()]
    assert {bank.in_dim for bank in banks} == {0} and all(bank.is_known for bank in banks)


def test_computed_banks_and_replicas_are_one_clear_line():
    model = nn.Sequential(Steps())
    sparsify(model, "ste", targets="*bank")
    with pytest.raises(ConfigError, match="DistributedDataParallel"):
        model[0]._replicate_for_data_parallel()
    del model[0]._parameters["bank"]
    with pytest.raises(ConfigError, match=r"'0.bank' is computed from another tensor"):
        model(torch.randn(4, 8))
