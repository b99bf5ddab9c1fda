"""Pictures and tables from run directories; they read files and nothing else."""

from sparsepretrain.reports.decay import decay_report
from sparsepretrain.reports.report import report, report_table

__all__ = ["decay_report", "report", "report_table"]
