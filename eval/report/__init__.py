"""From results files to tables, plots and pages; reads nothing else and measures nothing."""
