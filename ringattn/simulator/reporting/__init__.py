"""Output for people: tables and progress on the console, and trace files."""
