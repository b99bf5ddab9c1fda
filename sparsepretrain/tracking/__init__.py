"""Metric stream of a run: metrics.jsonl, W&B, TensorBoard and the console."""
