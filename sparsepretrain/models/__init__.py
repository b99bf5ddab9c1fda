"""Model recipes: build a model, name its layers by role; they know nothing of sparsity."""
