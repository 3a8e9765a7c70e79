"""What a machine can do: its numbers and their declarations, measured kernel times, presets, and machine files."""
