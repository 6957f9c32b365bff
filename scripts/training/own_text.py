"""Let the model continue pieces of the corpus, because drafters meet its own text.

    python own_text.py MODEL.gguf CORPUS_DIR

Reads train.u16 of tokenize_text.py; writes own.u16, 4,096 rows of 640 ids. Half of the answers are
greedy, the others sampled at temperatures of 0.3 to 1.
"""

from __future__ import annotations

import argparse
import sys
import threading
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from moegraph import Engine, EngineConfig, SamplingParams
from moegraph.engine.service import Service
from moegraph.loop.requests import Request, Step

N_SEQ, ROWS, TIME = 32, 4096, 640


def continued(service: Service, row: np.ndarray, rng: np.random.Generator) -> list[int]:
    """Return a row whose end the model has written; waits until it is there."""
    n_prompt = int(rng.integers(16, len(row) // 2))
    params = SamplingParams(
        temperature=0.0 if rng.random() < 0.5 else float(rng.uniform(0.3, 1.0)), top_k=0, top_p=1.0
    )
    tokens: list[int] = row[:n_prompt].tolist()
    done = threading.Event()

    def take(step: Step) -> None:
        tokens.extend(step.tokens)
        if step.finish_reason:
            done.set()

    request = Request(tokens[:], params, len(row) - n_prompt, ignore_eos=True, reuse=False)
    service.submit(request, take)
    done.wait()
    return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("corpus", type=Path)
    args = parser.parse_args()
    corpus, rng = np.fromfile(args.corpus / "train.u16", "<u2"), np.random.default_rng(3)
    starts = rng.integers(0, len(corpus) - TIME, ROWS)
    rows = corpus[starts[:, None] + np.arange(TIME)].astype("<u2")
    waiting, lock = iter(range(len(rows))), threading.Lock()
    config = EngineConfig(n_ctx=TIME + 8, n_seq=N_SEQ, spec="off", profile="none")
    with Engine.load(args.model, config) as engine:
        service = Service(engine)
        service.start()

        def work(seed: int) -> None:
            own = np.random.default_rng(seed)
            while True:
                with lock:
                    at = next(waiting, None)
                if at is None:
                    return
                rows[at] = continued(service, rows[at], own)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(N_SEQ)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        service.close()
    rows.tofile(args.corpus / "own.u16")


if __name__ == "__main__":
    main()
