"""What a machine can do: rates of its kernels and links, presets, and machine files."""
