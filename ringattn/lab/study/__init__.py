"""Studies: many points of the timing model in one folder, with tables, plots and a report; torch is imported lazily."""
