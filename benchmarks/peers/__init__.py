"""One small file a package; each defines `PACKAGE` (its name on PyPI) and `SUBJECTS`.

To the maintainers of these packages: if there is a faster documented way to do the same job
with yours, please tell us and the file will be changed.
"""
