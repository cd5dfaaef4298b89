"""Context parallelism: which rank holds which tokens, what moves between ranks, and the exchange."""
