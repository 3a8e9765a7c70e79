"""Training and inference steps of whole models on a machine: attention by its plan, all else by stated formulas."""
