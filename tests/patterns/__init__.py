"""Every training pattern: the numbers of a single process, or a clear refusal."""
