"""Compressed networks as files; `zeromean.export` is the way in."""
