"""Targets of the audit: `attend` of each module calls one library with the keywords of docs/audit.md."""
