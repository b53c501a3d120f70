"""How experiments are run, and what is kept of them: folders, logs, records, claims."""
