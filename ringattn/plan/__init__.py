"""Plans, their steps, and row sets: which rank computes which pairs and sends which rows to which rank."""
