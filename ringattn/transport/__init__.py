"""Transports: how messages travel. One fabric per file."""
