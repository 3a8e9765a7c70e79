"""Reports with their tables and figures, and the journal of finished work."""
