"""How `zm.compress` makes a pruned network smaller and faster.

`compress` traces the model (`graph`), finds out which units are constant or read by nobody
(`flow`), builds layers without them (`resizing`), and decides which ones to multiply sparsely
(`chains`, `sparse_layers`, `batch_last`). `blueprint` and `sparse_coding` write the result to
files, for `zeromean.export`.
"""
