"""The configuration groups, shipped with the package."""
