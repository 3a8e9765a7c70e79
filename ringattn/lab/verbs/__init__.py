"""The verbs of the laboratory, one per file, each with `main(config)`."""
