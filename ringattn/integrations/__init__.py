"""Doors for models of other libraries. Each module but `borders` needs the library that it is named after."""
