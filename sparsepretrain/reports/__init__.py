"""Pictures and tables from run directories; they read files and nothing else."""

from sparsepretrain.reports.decay import decay_report
from sparsepretrain.reports.report import report

__all__ = ["decay_report", "report"]
