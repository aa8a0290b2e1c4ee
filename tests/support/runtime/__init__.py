"""Stages, links and rank processes that tests of the runtime share."""
