"""Pages: reports with their tables and figures, and the journal of what is done."""
