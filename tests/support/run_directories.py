"""Synthetic run directories."""

import json
from pathlib import Path
from typing import Any

import yaml

LAYERS = [f"transformer.h.{i}.mlp.{name}" for i in range(2) for name in ("c_fc", "c_proj")]


def make_run(
    path: Path,
    method: str = "sste",
    *,
    seed: int = 0,
    flips: bool = True,
    sparsity: dict[str, Any] | None = None,
    phases: dict[int, float] | None = None,
    interval: int = 1,
    rate: float = 0.01,
    **config: Any,
) -> Path:
    path.mkdir(parents=True)
    options = {"name": method, "window": {"start": 0.0, "stop": 1.0}, **(sparsity or {})}
    whole = {"name": "nano", "seed": seed, "steps": 100, "sparsity": options, **config}
    (path / "config.yaml").write_text(yaml.safe_dump(whole, sort_keys=False))
    environment = {"command": f"train sparsity={method}", "commit": "0123456789abcdef"}
    (path / "environment.json").write_text(json.dumps(environment))
    lines = []
    for step in range(1, 101):
        line = {"step": step, "time": 0.5 * step, "tokens": 64 * step, "loss": 5.0 - 0.04 * step}
        line |= {"lr": 1e-3, "density": 0.5, "tokens_per_second": 128.0}
        if phases:
            line["sparse"] = [value for first, value in phases.items() if step >= first][-1]
        if flips and step % interval == 0:
            line |= {"flip_interval": float(interval)} if interval > 1 else {}
            line["flip_rate"] = 0.1 if step == 10 else rate
            if step % 20 == 0:
                line |= {f"flip_rate/{name}": 0.0 if step == 100 else 0.02 for name in LAYERS}
        lines.append(line)
        if step % 50 == 0:
            lines.append({"step": step, "tokens": 64 * step, "split": "validation"})
            lines[-1]["loss"] = 4.5 - 0.02 * step
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
