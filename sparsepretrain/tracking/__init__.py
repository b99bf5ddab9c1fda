"""The metric stream of a run: metrics.jsonl always, W&B, TensorBoard and the console."""
