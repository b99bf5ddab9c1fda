"""Figures and tables from run directories; nothing is computed on a model."""
