"""The command line's configuration: its schema, overrides, checks, and what is built from them."""
