"""Programs that are not tests: `python -m tools.NAME` in the root of the repository."""
