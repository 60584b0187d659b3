"""What a user may do between two hooks of the engine, and when: every act at every moment, and random programs of both.

Start with `vocabulary.py` (the acts), then `players.py` (who performs them), then `trial.py` (what is compared).
"""
