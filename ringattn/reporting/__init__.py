"""What is printed and written: tables, peak memory, and where numbers come from."""
