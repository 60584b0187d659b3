"""What a model's steps did, recorded while they run: traces and the numbers of the last step.

Start with trace.py; recorder.py is what runs inside a step, lanes.py makes lanes of its records, chrome.py the file.
May use: every package below.
Must not: change what a step does, or dispatch an operation.
"""
