"""Reads what ranks have written: traces into a report with advice, and the answers of a job that hangs into a table.

Start with command.py; numbers.py is what a report says, advice.py what it recommends.
May use: debug (names of files), errors, file_errors.
Must not: need the job whose files it reads, or use a tensor.
"""
