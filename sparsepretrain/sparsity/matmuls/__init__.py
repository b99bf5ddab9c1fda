"""The three matmuls of a layer: dense, in fp8 or sparse, and the choice between them."""
