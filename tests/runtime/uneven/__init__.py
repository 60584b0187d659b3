"""Tests of ranks that go different ways (`uneven_paths`)."""
