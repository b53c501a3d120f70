"""Modules that compressed networks are made of."""

from zeromean.compression.modules import moment_rules as _moment_rules

_RULES = _moment_rules  # Wherever there is such a module, its rule is known.
