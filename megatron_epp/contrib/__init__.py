"""Parts that training does not need: schedules of papers, exact plans, tables of other systems, demonstrations."""
