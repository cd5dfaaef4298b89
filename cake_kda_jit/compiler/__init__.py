"""From source text to a verified library: keys, cache, toolchain, build protocol."""
