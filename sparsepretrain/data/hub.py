"""The Hugging Face hub without its waiting: one probe decides between network and cache."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from sparsepretrain.errors import DataError

PROBE_SECONDS = 5.0


@contextmanager
def hub_access(*, offline: bool = False) -> Iterator[None]:
    """Inside, hub libraries are quiet, and use only their caches if the hub cannot be reached.

    Without this an unreachable hub costs 23 s of retries and six warnings per file.

    Args:
        offline: nothing remote is wanted, so do not ask whether the hub is there.
    """
    import huggingface_hub

    constants = huggingface_hub.constants
    before = constants.HF_HUB_OFFLINE
    verbosity = huggingface_hub.logging.get_verbosity()
    constants.HF_HUB_OFFLINE = offline or before or not _reachable()
    huggingface_hub.logging.set_verbosity_error()
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
        huggingface_hub.logging.set_verbosity(verbosity)


def _reachable() -> bool:
    import huggingface_hub

    try:
        session = huggingface_hub.get_session()
        session.head(huggingface_hub.constants.ENDPOINT, timeout=PROBE_SECONDS)
    except Exception:  # the HTTP library behind the session differs between versions
        return False
    return True


def reason(error: Exception) -> str:
    """First line of a library's message, without a final full stop."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(". ") if lines else type(error).__name__


def load_rows(
    options: Any,
    split: str,
    *,
    instead: str,
    data_files: Mapping[str, Sequence[str]] | None = None,
) -> Any:
    """A split of the data set of ``options``, loaded by the package ``datasets``.

    Args:
        options: of a source: name, path, subset and revision.
        split: as ``datasets`` names it; slices such as train[:10%] work.
        instead: what can be done without the network, for the messages.
        data_files: local files where ``path`` is a file format.

    Raises:
        DataError: the package is missing, the network is, or the data set cannot be loaded.
    """
    name, path = options.name, os.path.expanduser(options.path)
    files = {key: list(map(os.path.expanduser, value)) for key, value in (data_files or {}).items()}
    try:
        with _quiet_datasets(local=bool(files) or os.path.isdir(path)) as datasets:
            return datasets.load_dataset(
                path,
                options.subset,
                split=split,
                revision=options.revision,
                data_files=files or None,
            )
    except ImportError as error:
        raise DataError(
            f"{name} needs the package datasets: pip install 'sparsepretrain[hf]'"
        ) from error
    except ConnectionError as error:
        raise DataError(
            f"{name} needs the network: {reason(error)}; connect and run "
            f"`sparsepretrain prepare data={name}`, or {instead}"
        ) from error
    except Exception as error:  # datasets raises whatever its builders and pyarrow raise
        hint = ""
        if "scripts are no longer supported" in str(error):
            hint = "; set data.revision to a revision with data files (see the data set's hub page)"
        raise DataError(
            f"{name}: datasets cannot load data.path={path}: {reason(error)}{hint}"
        ) from error


@contextmanager
def _quiet_datasets(*, local: bool) -> Iterator[Any]:
    """``datasets`` without bars and logs, offline when the hub cannot be reached."""
    import datasets
    import huggingface_hub

    bars, verbosity = datasets.is_progress_bar_enabled(), datasets.logging.get_verbosity()
    offline = datasets.config.HF_HUB_OFFLINE
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    try:
        with hub_access(offline=local):
            datasets.config.HF_HUB_OFFLINE = offline or huggingface_hub.constants.HF_HUB_OFFLINE
            yield datasets
    finally:
        datasets.config.HF_HUB_OFFLINE = offline
        datasets.logging.set_verbosity(verbosity)
        if bars:
            datasets.enable_progress_bars()
