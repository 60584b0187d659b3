"""Drop-in modules: each has the names of another library and runs on this engine. Nothing in fsdp imports this package.

Start with fairscale.py, the names of fairscale. What stands behind them is in fsdp/fairscale_api.
May use: every package below.
Must not: import the library whose names it has.
"""
