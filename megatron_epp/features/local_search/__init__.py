"""Local search: small changes to small plans, kept where they are faster."""
