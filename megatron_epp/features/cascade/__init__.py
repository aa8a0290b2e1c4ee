"""Cascade attention: rows that several segments of a chunk read take one call for the queries of all of them."""
