"""From a record to source text."""
