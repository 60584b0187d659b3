"""Strategies and plugins with which training frameworks run on this engine. Nothing in fsdp imports this package.

Start with lightning.py, the strategies of Lightning. Each framework is imported by its own module alone.
May use: every package below.
Must not: be imported by another package.
"""
