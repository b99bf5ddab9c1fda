"""Pictures and tables from run directories; they read files and nothing else."""

from sparsepretrain.reports.report import report

__all__ = ["report"]
