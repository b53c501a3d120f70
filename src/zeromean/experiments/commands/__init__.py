"""The commands that know experiments; `zeromean.cli` puts them into the command line."""
