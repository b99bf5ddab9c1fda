"""Perplexity of a Hugging Face causal language model, at several window lengths.

A number without the length of the window cannot be compared: dense Llama-2-7B has 5.56 at 2048
tokens and 5.20 at 4096 (SPARSEFORGE_SAME_HARNESS.md of liuhanzuo/Mixture-of-Memory).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from sparsepretrain.errors import CheckpointError, DataError, reason
from sparsepretrain.models.pretrained import quiet

WINDOWS = (1024, 2048, 4096)
TOKENS_AT_ONCE = 2048
"""Tokens of a forward, of windows that are shorter: their fp32 scores are in memory."""


def read_tokens(directory: Path, files: Sequence[Path]) -> list[int]:
    """Tokenize text files with the tokenizer of a checkpoint, one after another.

    Raises:
        DataError: a file cannot be read as UTF-8.
        CheckpointError: the directory has no tokenizer.
    """
    import transformers

    texts = []
    for file in files:
        try:
            texts.append(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(
                f"--text {file}: expected a text file in UTF-8: {reason(error)}"
            ) from error
    with quiet(str(directory)):
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                directory, trust_remote_code=False
            )
        except Exception as error:
            raise CheckpointError(
                f"{directory} has no tokenizer that transformers loads: {reason(error)}; leave "
                "--text out to audit zeros only"
            ) from error
        return [i for text in texts for i in tokenizer(text)["input_ids"]]


def perplexities(
    directory: str | Path,
    tokens: Sequence[int],
    windows: Sequence[int] = WINDOWS,
    progress: Callable[[int, int, str], None] | None = None,
) -> list[dict[str, Any]]:
    """Return :func:`perplexities_of` a checkpoint, in fp32, on a GPU if there is one.

    Args:
        directory: a checkpoint that ``AutoModelForCausalLM`` loads.
        tokens, windows, progress: see :func:`perplexities_of`.

    Raises:
        CheckpointError: transformers cannot load it.
    """
    import transformers

    try:
        with quiet(str(directory)):
            model: Any = transformers.AutoModelForCausalLM.from_pretrained(
                directory, dtype=torch.float32, trust_remote_code=False
            ).eval()
    except Exception as error:
        raise CheckpointError(
            f"{directory} is no causal language model of transformers: {reason(error)}; leave "
            "--text out to audit zeros only"
        ) from error
    rows = model.get_input_embeddings().weight.shape[0]
    if tokens and max(tokens) >= rows:
        raise CheckpointError(
            f"{directory}: the tokenizer has the id {max(tokens)}, and the embedding {rows} rows"
        )
    model.to(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    return perplexities_of(model, tokens, windows, progress)


@torch.no_grad()
def perplexities_of(
    model: Any,
    tokens: Sequence[int],
    windows: Sequence[int],
    progress: Callable[[int, int, str], None] | None = None,
) -> list[dict[str, Any]]:
    """Return the perplexity of a causal language model in windows that do not overlap.

    Each window predicts all of its tokens but the first. Scores are fp32.

    Args:
        model: of transformers, in eval mode.
        tokens: ids of the text; what does not fill a window is left out.
        windows: lengths; those that the model has no positions for, or the text does not fill once,
            have a ``reason`` instead of numbers.
        progress: called with (windows that are done, all, text).

    Returns:
        one entry per window: ``window``, ``windows``, ``predicted`` tokens, ``loss`` in nats,
        ``perplexity``; or ``window`` and ``reason``.
    """
    device = next(model.parameters()).device
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    results: list[dict[str, Any]] = []
    for window in windows:
        count = len(tokens) // window
        if longest is not None and window > longest:
            results.append({"window": window, "reason": f"the model has {longest} positions"})
            continue
        if not count:
            results.append({"window": window, "reason": f"the text has {len(tokens)} tokens"})
            continue
        total = 0.0
        rows = torch.tensor(tokens[: count * window]).view(count, window)
        done = 0
        for ids in rows.split(max(1, TOKENS_AT_ONCE // window)):
            ids = ids.to(device)
            with quiet():  # of padding, which there is none of
                scores = model(input_ids=ids).logits[:, :-1].float().flatten(0, 1)
            targets = ids[:, 1:].flatten()
            total += float(torch.nn.functional.cross_entropy(scores, targets, reduction="sum"))
            done += len(ids)
            if progress is not None:
                progress(done, count, f"window {window}")
        predicted = count * (window - 1)
        loss = total / predicted
        value = math.exp(loss) if loss < 700 else math.inf
        numbers = {"predicted": predicted, "loss": loss, "perplexity": value}
        results.append({"window": window, "windows": count, **numbers})
    return results
