"""How `zm.compress` makes a pruned network smaller and faster.

| step | files |
| --- | --- |
| trace the model, with modules for functions | `tracing`, `functions`, `in_place`, `graph` |
| what nodes do to units; where these lie | `roles`, `states`, `layout`, `flattening`, `guards` |
| what is constant, what is needed | `reading`, `constants`, `needs`, `recurrence`, `analysis` |
| multipliers into weights; layers with fewer units | `folding`, `removal`, `resizing` |
| what is multiplied sparsely, and how | `chains`, `sparse_layers`, `batch_last`, `adapters` |
| all of it together, and what has come of it | `compress`, `report`, `sizes` |
| files, for `zeromean.export` | `blueprint`, `graph_blueprint`, `sparse_coding` |
"""
