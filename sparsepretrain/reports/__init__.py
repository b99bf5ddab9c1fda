"""Figures and tables from run directories; nothing is computed on a model."""

from sparsepretrain.reports.report import report, report_table

__all__ = ["report", "report_table"]
