"""Strategies and plugins with which training frameworks run on this engine. Users import them from fsdp.integrations.

Start with lightning_trainer.py, the strategy of Lightning's Trainer. Each framework is imported by its own modules alone.
May use: every package below.
Must not: be imported by another package than fsdp/integrations.
"""
