"""Commands for networks and data of one's own: `predict`, `inspect`, `doctor`.

A command is a dataclass, which tyro turns into options, with a `run` method that imports what it
needs (so that `--help` stays fast) and returns an exit code. `zeromean.cli` puts them together.
"""
