"""The tokens of every tokenizer of events, beside those of its items.

A module of its own: a reward reads what was recommended without a tokenizer, whose import takes 3 CPU-seconds.
"""

EVENT = "<[^<>]*>"  # the form of an event's token
PAD, UNKNOWN, END, START = "<pad>", "<unk>", "<end>", "<start>"
