"""The configuration of the command line: schemas, overrides, checks, and the objects built from it."""
