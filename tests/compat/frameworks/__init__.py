"""Training frameworks on this engine. `make test-frameworks` collects them, in an environment that has the frameworks."""
