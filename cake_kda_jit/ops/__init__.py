"""The thin dispatch: check, select, launch."""
