"""Command lines with a mistake: one clear line, exit code 2, nothing written."""

import json
import os
import re
import subprocess
import sys

import pytest

from sparsepretrain.config import compose
from sparsepretrain.config.freeze import flat
from sparsepretrain.config.places import catalog
from support import SUPPORT

GLOBAL = "# @package _global_\n"

USER_FILES = {
    "experiment/syntax.yaml": GLOBAL + "steps: [1\n",
    "experiment/duplicate.yaml": GLOBAL + "steps: 1\nsteps: 2\n",
    "experiment/tab.yaml": GLOBAL + "batch:\n\tsize: 1\n",
    "experiment/number.yaml": "5\n",
    "experiment/package.yaml": "steps: 5\n",
    "experiment/key.yaml": GLOBAL + "stesp: 5\n",
    "experiment/type.yaml": GLOBAL + "steps: many\n",
    "experiment/option.yaml": GLOBAL + "defaults:\n  - override /sparsity: sstee\n",
    "experiment/group.yaml": GLOBAL + "defaults:\n  - override /sparsty: sste\n",
    "experiment/interpolation.yaml": GLOBAL + "steps: ${batch.sise}\n",
    "sparsity/incomplete.yaml": "n: 2\n",
    "sparsity/nobody.yaml": "name: nobody\n",
    "optim/foreign.yaml": "defaults: [adamw, _self_]\nmomentum: 0.9\n",
    "data/unknown.yaml": "name: x\nsource: python_sourc\n",
    "model/norecipe.yaml": "name: x\nfamily: gpt3\n",
    "experiment/circle.yaml": GLOBAL + "defaults:\n  - /experiment/circle\n",
    "sparsity/bare.yaml": "name: bare\n",
    "bare.py": (
        "from sparsepretrain.registry import register\n"
        "@register('method', 'bare')\nclass Bare: pass\n"
    ),
    "exits.py": "import sys\nsys.exit(0)\n",
    "syntax.py": "x = (\n",
    "kind.py": (
        "from sparsepretrain.registry import register\n@register('methd', 'x')\nclass A: pass\n"
    ),
    "crash.py": "import nothing_of_this_name\n",
    "raises.py": "raise RuntimeError('first line\\nsecond line')\n",
    "taken.py": (
        "from sparsepretrain.registry import register\n"
        "@register('method', 'sste')\nclass Mine: pass\n"
    ),
    "shadow/sparsity/sste.yaml": "name: sste\n",
}


def typos() -> list[tuple[list[str], list[str]]]:
    """Return every key with a missing letter, with and without ``+``; the key is suggested."""
    cases = []
    for i, key in enumerate(flat(compose())):
        *parents, leaf = key.split(".")
        if len(leaf) < 3 or leaf == "experiment":
            continue
        wrong = ".".join([*parents, leaf[:-2] + leaf[-1]])
        prefix = ("", "+", "++")[i % 3]
        cases.append(([f"{prefix}{wrong}=1"], [f"unknown key {wrong!r} (did you mean {key!r}?)"]))
    return cases


def wrong_types() -> list[tuple[list[str], list[str]]]:
    """Return every key with a mapping as value, and values of similar types."""
    keys = [key for key in flat(compose()) if key not in ("experiment", "plugins", "probe")]
    # patterns is a mapping itself: its entry is named
    named = {"sparsity.patterns": "sparsity.patterns.a"}
    cases = [([f"{key}={{a:1}}"], [f"{named.get(key, key)} must be"]) for key in keys]
    return cases + [
        ([override], [override.partition("=")[0] + " must be"])
        for override in (
            "steps=1.5", "steps=many", "steps=null", "steps=true", "steps=[1]", "seed=1e3",
            "compile=1", "compile=yes", "compile=true", "compile=off",
            "clip=nan", "clip=inf", "clip=x", "batch=5",
            "eval=null", "optim.betas=0.9", "optim.betas=[0.9]", "plugins=a.py",
            "model.n_layer=1.0", "model.bias=0", "sparsity.targets=5", "sparsity.window=1",
            "tracker.entity=1", "guard=none", "sparsity.window.start=early",
            "data.validation=null", "precision.name=true",
        )
    ]  # fmt: skip


def out_of_range() -> list[tuple[list[str], list[str]]]:
    return [
        ([*overrides, override], [override.partition("=")[0].rpartition(".")[2]])
        for *overrides, override in (
            ("steps=99999999999999999999999",), ("epochs=1e30",),
            ("steps=0",), ("steps=-1",), ("seed=-1",), ("clip=0",), ("batch.size=0",),
            ("batch.micro=0",), ("batch.micro=5",), ("eval.every=-1",),
            ("log.every=0",), ("checkpoint.keep_last=0",),
            ("checkpoint.keep_every=300",), ("checkpoint.every=0", "checkpoint.keep_every=250"),
            ("checkpoint.keep_best=1",), ("eval.every=0", "checkpoint.keep_best=1"),
            ("optim.lr=0",), ("optim.lr=-1e-3",), ("optim.betas=[0.9,1.0]",), ("optim.eps=0",),
            ("optim.weight_decay=-0.1",), ("optim=sgd", "optim.momentum=-1"),
            ("optim=sgd", "optim.momentum=0", "optim.nesterov=true"),
            ("schedule.warmup=-1",), ("schedule.end=-1.0",), ("schedule.end=1.5",),
            ("precision=fp16", "precision.init_scale=0"), ("sparsity.gamma=1.5",),
            ("precision=fp8_sim", "precision.recipe=foo"),
            ("precision=fp8_sim", "precision.dtype=fp64"),
            ("sparsity.gamma=-0.1",), ("sparsity.n=5",),
            ("sparsity=ste", "sparsity.n=9", "sparsity.m=8"),
            ("sparsity=srste", "sparsity.decay=-1.0"), ("sparsity.targets=[]",),
            ("sparsity.window.start=-0.5",), ("sparsity.window.stop=1.5",),
            ("task.sequence_length=257",), ("task.sequence_length=0",), ("model.vocab_size=255",),
            ("model.n_head=3",), ("model.n_layer=0",), ("data.validation=1.5",),
            ("data.vocab_size=100",), ("name=a/b",), ("name=.hidden",), ("guard=ignore",),
            ("sparsity.beta=l2",), ("sparsity.mvue=all",), ("tracker.mode=of",),
            ("parallel.device=gpu",), ("optim.name=adam",), ("sparsity.name=sstee",),
            ("model.family=gpt3",), ("task.name=causal",), ("data.source=python",),
        )
    ]  # fmt: skip


def wrong_options() -> list[tuple[list[str], list[str]]]:
    cases = []
    for group, options in catalog().items():
        first = next(iter(options))
        wrong = first[:-1] + "#" if len(first) > 3 else first + "#"
        quoted = f"{group}='{wrong}'"
        cases.append(([quoted], [f"{group} has no option {wrong!r}", "did you mean"]))
        cases.append(([f"+{group}=qqqqqqqq"], [f"{group} has no option 'qqqqqqqq'", first]))
        cases.append(([f"{group}=[{first}]"], [f"{group} takes the name of an option", first]))
        if group not in ("experiment", "finetune"):
            cases.append(([f"{group}=null"], [f"{group} has no option 'null'"]))
    return cases


def grammar() -> list[tuple[list[str], list[str]]]:
    return [
        (["seed"], ["'seed'", "seed=value"]),
        (["optim.betas=[0.9,a]"], ["optim.betas[1] must be a number, got 'a'"]),
        (["plugins=[1]"], ["plugins[0] must be a string"]),
        (["=3"], ["'=3' has no key"]),
        (["seed=[1"], ["'seed=[1'"]),
        (["seed={a"], ["'seed={a'"]),
        (["seed==1"], ["'seed==1'"]),
        (["a b=1"], ["'a b=1'"]),
        (["optim.betas[0]=1"], ["optim.betas"]),  # Hydra 1.4 sets it, and it is out of range
        (["optim..lr=1"], ["'optim..lr=1'"]),
        (["name='open"], ["name='open"]),
        (["seed=1,2"], ["seed", "several runs", "sparsepretrain train -m"]),
        (["sparsity=ste,sste"], ["sparsity", "several runs"]),
        (["seed=range(1,3)"], ["seed", "several runs"]),
        (["seed=choice(1,2)"], ["seed", "several runs"]),
        (["model=glob(*)"], ["model", "several runs"]),
        (["~seed"], ["'~seed'", "leave it out"]),
        (["seed=" + "[" * 600], ["cannot be read", "close every bracket"]),
        (["name='a\nb'"], ["name must be a plain directory name"]),
        (["sparsity=ASP"], ["'ASP' (did you mean 'asp'?)"]),
        (["data=text"], ["'text' (did you mean 'text_files'?)"]),
        (["model=gpt2"], ["'gpt2' (choose from gpt2_124m, gpt2_1558m,"]),
        (["model=vit_nano", "task=causal_lm"], ["task"]),
        (["qqqqqqqq=1"], ["'qqqqqqqq' (choose from name, seed, steps"]),
        (["~sparsity=sste"], ["~sparsity"]),
        (["hydra.run.dir=x"], ["hydra.run.dir"]),
        (["hydra/launcher=basic"], ["hydra/launcher"]),
        (["optim@schedule=adamw"], ["optim@schedule"]),
        (["optim/adamw=1"], ["unknown group 'optim/adamw'"]),
        (["optim.betas.x=1"], ["optim.betas.x"]),
        (["seed.x=1"], ["seed must be an integer"]),
        (["seed=${sed}"], ["seed", "'sed' not found"]),
        (["seed=???"], ["seed"]),
        (["seed=" + "9" * 5000], ["'seed=999", "cannot be read"]),
        (["name=a${name}"], ["name: Recursive interpolation"]),
        (["lr=1e-3"], ["'lr' (did you mean 'optim.lr'?)"]),
        (["gamma=0.5"], ["'gamma' (did you mean 'sparsity.gamma'?)"]),
        (["modle=gpt2_nano"], ["'modle' (did you mean 'model'?)"]),
        (["+spasity=ste"], ["'spasity' (did you mean 'sparsity'?)"]),
        (["steps=int(x)"], ["steps=int(x)"]),
        (["--dry-rnu"], ["'--dry-rnu' (did you mean '--dry-run'?)"]),
        (["--cfg"], ["--cfg"]),
        (["--cfg", "jbo"], ["--cfg", "'job'"]),
        (["--dry-run=1"], ["--dry-run"]),
        (["-x"], ["-x"]),
        (["--config-dir"], ["--config-dir"]),
        (["--config-dir", "nowhere"], ["nowhere", "does not exist"]),
    ]


def user_files() -> list[tuple[list[str], list[str]]]:
    here = ["--config-dir", "DIR"]
    expected = {
        "syntax": ["syntax.yaml\", line 3"], "duplicate": ["duplicate.yaml\", line 3"],
        "tab": ["tab.yaml\", line 3"], "number": ["number.yaml"],
        "package": ["# @package _global_"], "key": ["'stesp' (did you mean 'steps'?)"],
        "type": ["steps must be an integer"],
        "option": ["sparsity/sstee.yaml", "did you mean 'sste'"], "group": ["sparsty"],
        "interpolation": ["steps", "batch.sise"],
        "circle": ["includes itself"],
    }  # fmt: skip
    return [
        *(([*here, f"experiment={name}"], words) for name, words in expected.items()),
        ([*here, "sparsity=incomplete"], ["missing key 'sparsity.name'"]),
        ([*here, "sparsity=nobody"], ["sparsity.name", "'nobody'"]),
        ([*here, "optim=foreign"], ["unknown key 'optim.momentum'"]),
        ([*here, "data=unknown"], ["'python_sourc' (did you mean 'python_source'?)"]),
        ([*here, "model=norecipe"], ["model.family", "'gpt3'"]),
        ([*here, "experiment=keyy"], ["experiment has no option 'keyy' (did you mean 'key'?)"]),
        (["--config-dir", "DIR/shadow"], ["sste.yaml would shadow the shipped", "rename"]),
        (["plugins=[DIR/none.py]"], ["none.py", "no such file"]),
        (["plugins=[DIR/crash.py]"], ["crash.py, line 1", "nothing_of_this_name"]),
        (["plugins=[DIR/raises.py]"], ["raises.py, line 1", "first line"]),
        (["plugins=[DIR/taken.py]"], ["'sste' exists already", "taken.py, line 2"]),
        (["plugins=[DIR/exits.py]"], ["SystemExit: 0", "exits.py, line 2"]),
        (["plugins=[DIR/syntax.py]"], ["SyntaxError", "syntax.py, line 1"]),
        (["plugins=[DIR/kind.py]"], ["'methd' (did you mean 'method'?)", "kind.py, line 2"]),
        ([*here, "plugins=[DIR/bare.py]", "sparsity=bare"], ["bare.py, line 2", "'Options'"]),
        (["plugins=[no_such_module_at_all]"], ["no_such_module_at_all"]),
    ]


def verbs() -> list[tuple[list[str], list[str]]]:
    return [
        (["trian"], ["unknown verb 'trian' (did you mean 'train'?)"]),
        (["seed=1"], ["sparsepretrain train seed=1"]),
        (["--versio"], ["'--versio'"]),
        (["report"], ["RUN"]),
        (["report", "a", "--ot", "b"], ["'--ot' (did you mean '--out'?)"]),
        (["doctor", "model=gpt2_nano"], ["model=gpt2_nano"]),
        (["prepare", "data=openwebtxt"], ["'openwebtxt' (did you mean 'openwebtext'?)"]),
        (["prepare", "--workers", "0"], ["--workers", "≥ 1"]),
        (["configs", "extra"], ["extra"]),
        (["methods", "plugins=[none.py]"], ["none.py"]),
    ]


def test_bad_commands_are_one_clear_line(tmp_path):
    # one test for all commands: the process that runs them takes seconds to start
    every_key = [*typos(), *wrong_types()]
    train = [*every_key[::4], *out_of_range(), *wrong_options(), *grammar(), *user_files()]
    assert (
        wrong_lines([*((["train", *argv], words) for argv, words in train), *verbs()], tmp_path)
        == []
    )


@pytest.mark.slow
def test_a_mistake_in_any_key_is_one_clear_line(tmp_path):
    every_key = [*typos(), *wrong_types()]
    assert wrong_lines([(["train", *argv], words) for argv, words in every_key], tmp_path) == []


def wrong_lines(cases, root) -> list[tuple]:
    """Return the commands that wrote a file, or whose output is not one line with the words."""
    user, work = root / "user", root / "work"
    work.mkdir()
    for name, text in USER_FILES.items():
        file = user / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    argvs = [[word.replace("DIR", str(user)) for word in argv] for argv, _ in cases]
    command = [sys.executable, str(SUPPORT / "run_cases.py")]
    env = {**os.environ, "SPARSEPRETRAIN_CACHE_DIR": str(work / "cache")}
    options = {"cwd": work, "env": env, "stdout": subprocess.PIPE, "text": True, "check": True}
    results = json.loads(subprocess.run(command, input=json.dumps(argvs), **options).stdout)
    wrong = []
    for (argv, words), result in zip(cases, results, strict=True):
        error = result["err"]
        line = re.fullmatch(r"sparsepretrain: (config|usage) error: [^\n]{,370}\n", error)
        named = all(word in error for word in words) and "object at 0x" not in error
        if not line or not named or (result["code"], result["out"], result["made"]) != (2, "", []):
            wrong.append((argv, words, result))
    return wrong
