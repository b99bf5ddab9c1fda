"""Dense model recipes, one module per family; see :class:`Recipe`."""

from sparsepretrain.models._recipe import Head, Headable, Recipe

__all__ = ["Head", "Headable", "Recipe"]
