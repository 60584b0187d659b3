"""Tests on the pretend accelerator. tests/device/test_accelerator.py runs each file in a process of its own."""
