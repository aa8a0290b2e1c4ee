"""Chunk tables: slices of long sequences, packed short ones, whole sequences, tables of replicas aligned."""
