"""TRL's packing of documents of given lengths: `python trl_packing.py LENGTHS.npy WIDTH AT_ONCE` prints one JSON line.
SFTTrainer gives its packing 1,000 documents at a time, the default of `Dataset.map`."""

import json
import sys
import time

import numpy as np
from datasets import Dataset
from trl import pack_dataset

lengths, width, at_once = np.load(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
data = Dataset.from_dict({"input_ids": [[1] * int(n) for n in lengths]}).with_format("arrow")
began = time.process_time()
packed = pack_dataset(data, width, "bfd", {"desc": None, "batch_size": at_once})
spent = time.process_time() - began
assert sum(map(len, packed["seq_lengths"])) == len(lengths), "every document is packed"
print(json.dumps({"fill": float(lengths.sum()) / (width * len(packed)), "packed_s": len(lengths) / spent}))
