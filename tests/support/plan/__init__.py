"""Plans, batches and machines that tests of planning share."""
