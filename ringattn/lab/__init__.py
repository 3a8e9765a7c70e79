"""The laboratory: what this project and planners of clusters ask. Nothing else of the package imports it."""
