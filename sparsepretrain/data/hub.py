"""The Hugging Face hub without its waiting: one probe decides between network and cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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


@contextmanager
def quiet_datasets(*, local: bool) -> Iterator[None]:
    """Inside, ``datasets`` has no bars and logs, and is offline when the hub is out of reach."""
    import datasets
    import huggingface_hub

    bars, verbosity = datasets.is_progress_bar_enabled(), datasets.logging.get_verbosity()
    offline = datasets.config.HF_HUB_OFFLINE
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    try:
        with hub_access(offline=local):
            datasets.config.HF_HUB_OFFLINE = offline or huggingface_hub.constants.HF_HUB_OFFLINE
            yield
    finally:
        datasets.config.HF_HUB_OFFLINE = offline
        datasets.logging.set_verbosity(verbosity)
        if bars:
            datasets.enable_progress_bars()
