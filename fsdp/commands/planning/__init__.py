"""Says before a job starts what it will need: memory, communication and time, for each choice of options.

Start with plan.py, which compares choices (choices.py). Each of them is rehearsed (the package rehearsal). comparison.py says
what is recommended, plan_page.py writes a page, and measure.py measures the links of a running job.
May use: commands.rehearsal, commands.reporting (the page), building, config, errors, file_errors.
Must not: need a process group.
"""
