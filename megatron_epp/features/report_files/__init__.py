"""Files of reports: figures of every iteration, plans, times and traces of some (`--epp-report-dir`)."""
