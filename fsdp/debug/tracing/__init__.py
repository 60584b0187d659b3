"""What a trace is made of: what is recorded while steps run, its lanes, and the file.

Start with recorder.py, which runs inside a step; lanes.py makes lanes of its records, chrome.py the file. `fsdp.trace` itself is
in api/trace.py.
May use: comm, debug, errors, file_errors.
Must not: change what a step does, or dispatch an operation.
"""
