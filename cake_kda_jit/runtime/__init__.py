"""From an artifact to a launch: devices, verified loading, and the one C ABI call path."""
