"""TRL's packing of documents of given lengths, as SFTTrainer calls it: `python trl_packing.py LENGTHS.npy WIDTH` prints
one JSON line."""

import json
import sys
import time

import numpy as np
from datasets import Dataset
from trl import pack_dataset

lengths, width = np.load(sys.argv[1]), int(sys.argv[2])
data = Dataset.from_dict({"input_ids": [[1] * int(n) for n in lengths]}).with_format("arrow")
began = time.process_time()
packed = pack_dataset(data, width, "bfd", {"desc": None})
spent = time.process_time() - began
print(json.dumps({"fill": float(lengths.sum()) / (width * len(packed)), "packed_s": len(lengths) / spent}))
