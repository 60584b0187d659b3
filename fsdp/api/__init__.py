"""The functions that a user calls on a model: wrap, summon, clip, trace, move to the host, communication hooks, recovery, story.

Start with wrap.py. It shows every option and the order in which a model is planned, built and driven.
May use: every package below.
Must not: import torch.distributed, resize storage, or look at autograd nodes and frames.
"""
