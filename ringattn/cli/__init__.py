"""The verbs of the command line, one file with a `main(config)` for each."""
