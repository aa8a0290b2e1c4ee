"""Programs that a training never imports: commands, formulas of costs, layouts, advice, reports, launching."""
