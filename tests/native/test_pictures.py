"""Pictures of clients: hostile files, limits, messages of every interface, and the command line."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from helpers.images import GIF, JPEG, bmp, has_mtmd, hostile, png
from helpers.patience import PATIENCE_S, until
from helpers.shared import model_writer
from modelgen.mmproj import write_mmproj

from moegraph.arch import ModelFile, open_model
from moegraph.cli import main
from moegraph.config import EngineConfig
from moegraph.engine import Engine
from moegraph.engine.chat import ChatModel, ChatRequest
from moegraph.errors import ConfigError, ModelFileError, RequestError, ServiceClosed
from moegraph.pictures import Picture
from moegraph.server import anthropic, responses
from moegraph.server.ollama import OllamaBody
from moegraph.server.openai_chat import ChatBody
from moegraph.text import pictures
from moegraph.text.chat.prompting import CHATML
from moegraph.text.chat.template import ChatTemplate
from moegraph.text.pictures import PictureReader, find_mmproj

pytestmark = pytest.mark.skipif(not has_mtmd(), reason="this build has no libmtmd")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, and its encoder beside it."""
    found = tmp_path_factory.mktemp("pictures")
    path = model_writer(found, 3)("mini35b")
    with open_model(path) as model:
        write_mmproj(found / "mini-mmproj-F16.gguf", model.hparams.n_embd)
    return found


@pytest.fixture(scope="module")
def model(folder: Path) -> Iterator[ModelFile]:
    with open_model(folder / "mini35b.gguf") as found:
        yield found


@pytest.fixture(scope="module")
def reader(model: ModelFile, folder: Path) -> Iterator[PictureReader]:
    (folder / "seen").mkdir()
    (folder / "seen" / "a.png").write_bytes(png(40, 40))
    (folder / "secret.png").write_bytes(png(40, 40))
    mmproj = find_mmproj(model.path)
    assert mmproj
    found = PictureReader(model, mmproj, 1, folder / "seen")
    yield found
    found.close()


def test_hostile_files_are_refused_in_one_line(reader: PictureReader) -> None:
    n_refused = 0
    for data in hostile(200):
        try:
            reader.encode(data)
        except RequestError as error:
            n_refused += 1
            assert str(error).startswith("picture: ") and "\n" not in str(error), data[:20]
    assert 60 < n_refused < 200, "some damage leaves a picture"
    for data in (png(40, 30), bmp(33, 20), JPEG, GIF):
        assert any(isinstance(part, Picture) for part in reader.encode(data))


def test_a_picture_is_encoded_once_and_after_a_lost_process(reader: PictureReader) -> None:
    data = png(50, 60, 7)
    first = reader.encode(data)
    assert reader.encode(data) is first
    assert reader._child
    reader._child.kill()
    with pytest.raises(RequestError, match="^picture: the process that reads it ended$"):
        reader.encode(data + b"\0")
    again = [part for part in reader.encode(data + b"\0") if isinstance(part, Picture)]
    (before,) = [part for part in first if isinstance(part, Picture)]
    assert (again[0].rows == before.rows).all()
    assert again[0].ids.tolist() != before.ids.tolist(), "another file has other ids"


@pytest.mark.parametrize(
    "address, said",
    [
        ("http://localhost/a.png", "no address is fetched"),
        ("file:///../secret.png", "no file under --media-path"),
        ("file:///none.png", "no file under --media-path"),
        ("data:image/png;base64,???", "not base64"),
        ("data:image/png,abc", "no address is fetched"),
        (None, "no address is fetched"),
    ],
)
def test_addresses_that_are_refused(reader: PictureReader, address: object, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        reader.data(address, "messages[0]")


def test_files_under_the_media_path_and_data_are_read(reader: PictureReader) -> None:
    data = png(40, 40)
    assert reader.data("file:///a.png", "") == reader.data(uri(data), "") == data


def test_limits(
    model: ModelFile, folder: Path, reader: PictureReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures, "MAX_BYTES", 100)
    with pytest.raises(RequestError, match="allowed: 1 to 100"):
        reader.encode(png(40, 40, 9))
    monkeypatch.undo()
    small, side = png(40, 40), (8193).to_bytes(4, "big")
    with pytest.raises(RequestError, match="8193 x 8193 pixels; at most 67108864 in all"):
        reader.encode(small[:16] + side + side + small[24:])
    monkeypatch.setattr(pictures, "MAX_PICTURES", 1)
    shown: dict[str, pictures.Shown] = {}
    reader.show(shown, uri(png(40, 40)), "one")
    with pytest.raises(RequestError, match="two: more than 1 pictures"):
        reader.show(shown, uri(png(40, 40)), "two")
    slow = PictureReader(model, folder / "mini-mmproj-F16.gguf", 1, max_seconds=0.001)
    with pytest.raises(ModelFileError, match="took more than"):
        slow.encode(png(40, 40))
    with pytest.raises(ConfigError, match="cannot read the encoder"):
        PictureReader(model, folder / "none.gguf", 1)
    lost = PictureReader(model, folder / "mini-mmproj-F16.gguf", 1, device="cuda:99")
    with pytest.raises(ModelFileError, match="^--mmproj: the process that reads it ended$"):
        lost.encode(png(40, 40))
    wrong = PictureReader(model, model.path, 1)
    with pytest.raises(ModelFileError, match="not a picture encoder of this model"):
        wrong.encode(png(40, 40))


def test_closing_waits_for_no_picture(model: ModelFile, folder: Path) -> None:
    reader = PictureReader(model, folder / "mini-mmproj-F16.gguf", 1)
    reader.encode(png(40, 40))
    assert reader._child
    os.kill(reader._child.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as thread:
        encoding = thread.submit(reader.encode, png(50, 50))
        until(reader._lock.locked)
        reader.close()
        with pytest.raises(ServiceClosed):
            encoding.result(PATIENCE_S)
    with pytest.raises(ServiceClosed):
        reader.encode(png(40, 40))
    assert reader._child is None


def test_the_process_ends_with_its_reader_in_the_middle_of_a_picture(
    model: ModelFile, folder: Path
) -> None:
    ours, theirs = Pipe()
    command = [sys.executable, "-m", "moegraph.text.pictureprocess", str(theirs.fileno())]
    reader = PictureReader(model, folder / "mini-mmproj-F16.gguf", 1)
    with subprocess.Popen(command, pass_fds=[theirs.fileno()]) as child:
        theirs.close()
        ours.send_bytes(json.dumps(reader._asked).encode())
        assert json.loads(ours.recv_bytes()) == []
        ours.send_bytes(png(1500, 1500))
        ours.close()
        assert child.wait(PATIENCE_S) == 0, "its answer would find no reader"


def uri(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    settings = EngineConfig(device="cpu", n_threads=1, n_ctx=1024, profile="none")
    with Engine.load(folder / "mini35b.gguf", settings) as found:
        yield found


def test_messages_of_every_interface_become_prompts(
    engine: Engine, folder: Path, reader: PictureReader
) -> None:
    data = uri(png(70, 40))
    source = {"type": "base64", "media_type": "image/png", "data": data.partition(",")[2]}
    text, asked = {"type": "text", "text": "What is it?"}, "What is it?"
    openai = [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": data}}, text]}
    ]
    block = {"role": "user", "content": [{"type": "image", "source": source}, text]}
    item = {"role": "user", "content": [{"type": "input_image", "image_url": data},
                                        {"type": "input_text", "text": asked}]}  # fmt: skip
    told = {"role": "user", "content": asked, "images": [source["data"]]}
    question = {"prompt": asked, "images": [source["data"]]}
    bodies = [OllamaBody.model_validate(one).openai() for one in ({"messages": [told]}, question)]
    ollama = [one.messages for one in bodies if isinstance(one, ChatBody)]
    conversation = responses.Conversation()
    conversation.add(item, "input[0]")
    with ChatModel.of(engine, ChatTemplate(CHATML, "ChatML"), reader) as chat:
        found = [
            chat.prepare(ChatRequest(messages)).request
            for messages in (
                openai, anthropic.read_message(block, "m"), conversation.messages,
                *([one.plain() for one in messages] for messages in ollama),
            )
        ]  # fmt: skip
        (row, picture) = found[0].pictures[0]
        assert [list(one.prompt) for one in found[1:]] == [list(found[0].prompt)] * 4
        assert list(found[0].prompt[row:][: len(picture.ids)]) == picture.ids.tolist()
        tokens = list(found[0].prompt)
        around = engine.tokenizer.decode(
            [*tokens[:row], *tokens[row + len(picture.ids) :]], special=True
        )
        assert around.startswith("<|im_start|>user\n<|vision_start|><|vision_end|>")
        assert asked in around and around.endswith("<|im_start|>assistant\n")
        events = engine.generate(found[0].prompt, max_tokens=3, pictures=found[0].pictures)
        assert len(list(events)) == 3
        with pytest.raises(RequestError, match="'input_audio'; this model reads text and pictures"):
            chat.prepare(ChatRequest([{"role": "user", "content": [{"type": "input_audio"}]}]))
        chat.pictures = None
        with pytest.raises(RequestError, match="'image_url'; this model reads text only"):
            chat.prepare(ChatRequest(openai))


def test_chat_shows_pictures(folder: Path) -> None:
    (folder / "chatml.jinja").write_text(CHATML)
    (folder / "shown.png").write_bytes(png(60, 90))
    common = ["chat", str(folder / "mini35b.gguf"), "--device", "cpu", "-n", "2", "-t", "1", "-q"]
    common += ["--profile", "none", "--chat-template-file", str(folder / "chatml.jinja"), "--json"]
    shown, asked = ["--image", str(folder / "shown.png")], ["-p", "What?"]

    def run(*args: str) -> Result:
        return CliRunner().invoke(main, [*common, *asked, *args])

    with_picture, without = run(*shown), run()
    assert with_picture.exit_code == without.exit_code == 0, with_picture.output
    n_more = json.loads(with_picture.stdout)["n_prompt"] - json.loads(without.stdout)["n_prompt"]
    assert n_more > 8
    for args, said in (
        ([*shown, "--mmproj", "none"], "without --mmproj FILE"),
        ([*shown, "--no-mmproj"], "without --mmproj FILE"),
        (["--image", str(folder / "absent.png")], "cannot read the picture"),
        ([*shown, "--mmproj", str(folder / "mini35b.gguf")], "no picture encoder"),
    ):
        refused = run(*args)
        assert refused.exit_code == 2 and said in refused.output
