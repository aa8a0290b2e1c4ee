"""Plans and runs for people to look at: text, tables, Chrome traces, Gantt pictures. Import from the modules."""
