"""Training data: files → `FieldStore` → windows → batches.

`store`, `statistics` and the vocabulary of data (`times`, `units`, `aliases`, `solar`) are here. The rooms below:
`sources/` has one plug-in for each format, `files/` reads files fast and safely, `loading/` makes batches of samples,
and `tools/` has the commands that are run on data before a training.
"""
