"""What people read: tables, progress, pages, plots; and journals, by which interrupted work goes on."""
