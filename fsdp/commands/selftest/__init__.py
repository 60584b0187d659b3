"""`python -m fsdp selftest`: checks on the machine of a user that training on shards gives the numbers of training without.

Start with command.py, which starts the ranks and prints the report; checks.py is what they check.
May use: every package below.
Must not: be imported by another package, or be needed for training.
"""
