"""`moegraph pull`: bring a model of a hub into the cache."""

from __future__ import annotations

import click

from ..gguf.hub import download
from ..gguf.hubnames import parse_hub_name
from . import ui


@click.command()
@click.argument("name", metavar="OWNER/REPO[:QUANT]")
def pull(name: str) -> None:
    """Download a GGUF model of Hugging Face into the cache, and print the path of its file.

    QUANT is a quantization such as Q8_0 (default: Q4_K_M), or the name of a file. Commands take
    the model as -hf OWNER/REPO[:QUANT], or hf:OWNER/REPO[:QUANT] in place of TARGET, and download
    it themselves if the cache lacks it; only pull looks for a newer one. A download that was cut
    goes on where it stopped. Files that are there already are read and compared with their
    checksums.

    Environment: HF_TOKEN for private and restricted models, HF_ENDPOINT for another hub,
    HF_HUB_CACHE for the folder, HF_HUB_OFFLINE=1 to use only what is there. Needs the package
    huggingface_hub, which the extra `server` brings.

    \b
    Examples:
      moegraph pull unsloth/Qwen3.6-35B-A3B-GGUF
      moegraph pull unsloth/Qwen3.6-35B-A3B-GGUF:UD-Q4_K_XL
      moegraph run -hf unsloth/Qwen3.6-35B-A3B-GGUF -p "def fibonacci(n):"
    """
    with ui.Bars() as bars:

        def say(line: str) -> None:
            bars.clear()
            ui.note(line)

        path = download(parse_hub_name(name), bars, say, verify=True)
    click.echo(path)
