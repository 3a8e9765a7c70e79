"""What people read: tables, progress, peak memory, and the code that made a number."""
