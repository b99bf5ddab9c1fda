"""TensorBoard event files in ``run_dir/tensorboard``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class TensorBoard:
    """A mirror (see :class:`~sparsepretrain.tracking.mirror.Mirror`)."""

    name = "TensorBoard"

    def __init__(self, run_dir: Path, config: dict[str, Any], resume_step: int | None) -> None:
        self._directory = Path(run_dir) / "tensorboard"
        self._config = config
        self._resume_step = resume_step

    def open(self) -> None:
        """Start an event file; on resume, points of later steps are hidden."""
        import tensorboard  # noqa: F401  (torch's own message does not name the package)
        from torch.utils.tensorboard import SummaryWriter

        purge = None if self._resume_step is None else self._resume_step + 1
        self._writer = SummaryWriter(str(self._directory), purge_step=purge)
        text = json.dumps(self._config, indent=2, default=str)
        self._writer.add_text("config", f"```json\n{text}\n```")

    def log(self, step: int, values: dict[str, float]) -> None:
        """One scalar per key."""
        for key, value in values.items():
            self._writer.add_scalar(key, value, step)

    def close(self, exit_code: int, summary: dict[str, Any]) -> None:
        """Write the summary as text and close the file."""
        text = json.dumps({"exit_code": exit_code, **summary}, indent=2, default=str)
        self._writer.add_text("summary", f"```json\n{text}\n```")
        self._writer.close()
