"""`moegraph perplexity`: how well a model predicts a text, in llama-perplexity's figures."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from ..errors import RequestError
from ..interrupt import cancel_on_interrupt
from . import models, options
from .models import target_argument
from .options import Command

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ..bench.perplexity import Scored

_HEADING = (
    "chunk             PPL               ln(PPL(Q)/PPL(base))          KL Divergence              "
    "Δp RMS            Same top p"
)


@click.command(cls=Command)
@target_argument
@click.option("-f", "--file", metavar="FILE", help="Read the text from FILE (-: stdin).")
@click.option(
    "--chunks", type=click.IntRange(1), default=None, metavar="N",
    help="Score only the first N chunks.",
)  # fmt: skip
@click.option(
    "--kl-divergence-base", "--save-all-logits", "base_path", type=click.Path(path_type=Path),
    metavar="FILE", help="Write the probabilities to FILE, in llama.cpp's format.",
)  # fmt: skip
@click.option(
    "--kl-divergence", "compares", is_flag=True,
    help="Compare with the file of --kl-divergence-base, which has the text too.",
)  # fmt: skip
@options.engine_options(
    "cache_ram", "context_shift", "n_keep", "mmproj_device", drafts=False, n_ctx=512
)
def perplexity(
    target: str, file: str | None, chunks: int | None, base_path: Path | None, compares: bool,
    **given: Any,
) -> None:  # fmt: skip
    """Measure how well the model TARGET predicts a text, as llama-perplexity does.

    The second half of each chunk of -c tokens is scored. What is printed after a chunk is the
    perplexity so far.

    \b
    Examples:
      moegraph perplexity model.gguf -f wiki.test.raw
      moegraph perplexity Q8_0.gguf -f wiki.test.raw --chunks 50 --kl-divergence-base q8.kld
      moegraph perplexity Q4_K_M.gguf --kl-divergence-base q8.kld --kl-divergence
    """
    from ..bench.perplexity import MIN_CTX, begin_base, chunks_of, open_base, score

    config, text, base, n_expected = options.build_config(given), "", None, 0
    if compares:
        if base_path is None or file is not None:
            raise RequestError("--kl-divergence takes --kl-divergence-base FILE in place of -f")
        n_expected, ids, base = open_base(base_path)
        if options.is_given("n_ctx") and config.n_ctx != ids.shape[1]:
            raise RequestError(f"{base_path}: made with a context of {ids.shape[1]}; leave -c away")
        config = replace(config, n_ctx=ids.shape[1])
    elif file is None:
        raise RequestError("no text; give -f FILE")
    else:
        text = options.read_text(file)
    if config.n_ctx < MIN_CTX:
        raise RequestError(f"-c is {config.n_ctx}; a chunk has at least {MIN_CTX} tokens")
    with ExitStack() as stack:
        model = stack.enter_context(models.open_header(target))
        models.require_vocabulary(model)
        n_vocab, n_expected = model.hparams.n_vocab, n_expected or model.hparams.n_vocab
        if n_vocab != n_expected:
            raise RequestError(
                f"{base_path}: of a vocabulary of {n_expected} tokens, not {n_vocab} as the model's"
            )
        engine = stack.enter_context(models.load_engine(model, config, text=True))
        if base is None:
            ids = chunks_of(engine, text, config.n_ctx)
        ids = ids[:chunks]
        output = None
        if base_path and base is None:
            output = stack.enter_context(base_path.open("wb"))
            begin_base(output, ids, n_vocab)
        cancel = stack.enter_context(cancel_on_interrupt())
        _show(score(engine, ids, cancel), base, output)
        models.show_messages(engine)


def _show(
    chunks: Iterator[list[Scored]], base: npt.NDArray[np.uint16] | None, output: BinaryIO | None
) -> None:
    """Print figures after each chunk, and at the end."""
    from ..bench.perplexity import Divergence, estimate, nlls

    found, against = list[float](), Divergence()
    if base is not None:
        click.echo(_HEADING)
    for i, rows in enumerate(chunks, 1):
        if base is not None:
            click.echo(f"{i:4d}{against.add(rows, base[i - 1])}")
            continue
        found += nlls(rows, output)
        click.echo(f"[{i}]{math.exp(math.fsum(found) / len(found)):.4f},", nl=False)
    click.echo("\n".join(["", *(against.lines() if base is not None else [estimate(found)])]))
