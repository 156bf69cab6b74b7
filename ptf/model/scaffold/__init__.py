"""`ptf scaffold`: the first version of a family's file, written from transformers' model of a small config.

What can be read from names, shapes and a forward pass is mapped; what cannot is named in a report; every setting that
the file does not read is refused by it.
"""
