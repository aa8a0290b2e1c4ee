"""Chunk tables: slices of long sequences, packed short ones, variants of tables, tables of replicas aligned."""
