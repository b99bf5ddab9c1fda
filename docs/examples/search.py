"""Search for settings with Optuna: `pip install optuna`, then `python search.py [KEY=VALUE …]`.

Each trial is a run per seed in runs/search. Repeat the command to add 20 trials; a trial that was
interrupted is not continued. Choose another study_name for other settings.
"""

import math
import subprocess
import sys

import optuna

from sparsepretrain.config.validate import load
from sparsepretrain.runs.directory import RunDirectory

DIVERGED = 5  # exit code


def validation_loss(trial: optuna.Trial) -> float:
    """Train with both seeds; return the mean of their last validation losses."""
    settings = {
        "optim.lr": trial.suggest_float("optim.lr", 1e-4, 1e-2, log=True),
        "sparsity": trial.suggest_categorical("sparsity", ["ste", "srste"]),
    }
    losses = []
    for seed in (0, 1):
        words = [f"{key}={value}" for key, value in settings.items()]
        words += ["runs_dir=runs/search", f"name=trial{trial.number}", f"seed={seed}"]
        words += sys.argv[1:]
        code = subprocess.call([sys.executable, "-m", "sparsepretrain", "train", *words])
        if code == DIVERGED:
            return math.inf
        if code:
            sys.exit(code)
        record = RunDirectory.of(load(words)).record()
        losses.append([line["loss"] for line in record if line.get("split") == "validation"][-1])
    return sum(losses) / len(losses)


if __name__ == "__main__":
    study = optuna.create_study(
        study_name="search", storage="sqlite:///search.db", load_if_exists=True
    )
    study.optimize(validation_loss, n_trials=20)
    print(study.best_value, study.best_params)
