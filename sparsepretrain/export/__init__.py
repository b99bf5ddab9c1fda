"""Export of trained runs to other libraries."""

from sparsepretrain.export.library import save_onnx
from sparsepretrain.export.run import export_run
from sparsepretrain.export.semi_structured import load_semi_structured

__all__ = ["export_run", "load_semi_structured", "save_onnx"]
