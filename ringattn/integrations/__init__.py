"""Doors for models of other libraries. Each module but `comparison` needs the library that it is named after."""
