"""Tests of what is done between phases of a program."""
