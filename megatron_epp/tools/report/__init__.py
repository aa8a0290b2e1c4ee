"""Reports of plans and runs: text, tables, Chrome traces, Gantt pictures. Import from the modules."""
