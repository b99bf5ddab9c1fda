"""What every process of tests/dist/test_packed_gathering.py runs: shards.py with both gatherings."""

from __future__ import annotations

import json
import sys
import warnings
from functools import partialmethod
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from shards import train

from sparsepretrain.sparsity import Sparsifier

prepare = Sparsifier.prepare_sharding


def trained(case: dict[str, Any], gather: str) -> tuple[dict[str, Any], str]:
    """What ``shards.train`` returns, and what the coverage says of the gathering."""
    seen = []

    def prepared(own: Sparsifier, how: str) -> None:
        seen.append(own)
        prepare(own, gather=how)

    with patch.object(Sparsifier, "prepare_sharding", partialmethod(prepared, gather)):
        result = train(shards=True, **case)
    return result, seen[0].coverage().gathered


def compare(case: dict[str, Any]) -> dict[str, Any]:
    """Whether all bits are equal, and what was packed."""
    (one, _), (many, told) = (trained(case, gather) for gather in ("operand", "packed"))
    states = one.pop("state"), many.pop("state")
    equal = all(torch.equal(value, states[1][name]) for name, value in states[0].items())
    return {"equal": equal and one == many, "told": told}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = [compare(case) for case in json.loads(sys.argv[1])]
    if dist.get_rank() == 0:
        print(json.dumps(results))
    dist.destroy_process_group()
