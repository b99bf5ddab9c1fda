"""Access to the Hugging Face hub; one probe decides between network and cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

PROBE_SECONDS = 5.0


@contextmanager
def hub_access(*, offline: bool = False) -> Iterator[None]:
    """Silence hub libraries and restrict them to their caches if ``offline`` or unreachable.

    Otherwise an unreachable hub costs 23 s of retries and six warnings per file.
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


@contextmanager
def quiet_datasets(*, local: bool) -> Iterator[None]:
    """Silence ``datasets`` and restrict it to its cache if the hub is unreachable."""
    import datasets
    import huggingface_hub

    bars = datasets.is_progress_bar_enabled()
    verbosity = datasets.logging.get_verbosity()
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
