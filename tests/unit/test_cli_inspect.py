"""`moegraph inspect`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from helpers.ggufbytes import Shape, T, edit, kv, model_file, model_pairs, vocab_pairs
from helpers.shared import model_writer

from moegraph.cli import main


def invoke(*args: object) -> Result:
    result = CliRunner().invoke(main, [str(arg) for arg in args])
    assert "\x1b" not in result.output
    assert "Traceback" not in result.output
    return result


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "m.gguf"
    path.write_bytes(model_file().build())
    return path


class TestInspect:
    def test_dense_layers_have_no_experts(self, tmp_path: Path) -> None:
        path = model_writer(tmp_path, 0)("glm4moe-groups")
        text = " ".join(invoke("inspect", path).stdout.split())
        assert "experts 32 a layer, 6 a token, and one shared, in 1 of 3 layers" in text
        assert re.search(r" 0-1 2 attention [0-9]+ KiB - - - 2 1 attention ", text)
        report = json.loads(invoke("inspect", path, "--json").stdout)
        assert [layer["expert_bytes"] > 0 for layer in report["layers"]] == [False, False, True]
        assert report["hparams"]["rules"]["n_groups"] == 4

    @pytest.mark.parametrize(
        ("name", "options", "line"),
        [("qwen3moe", (), "1.50 KiB for each position, in layers 0-2"),
         ("legacy32", ("-ctk", "q8_0", "-ctv", "q8_0"), "544 B for each position, in layers 3, 7"),
         ("gptoss", (), "1.00 KiB for each position, in layers 1, 3; "
          "1.00 KiB for each position of a window of 32, in layers 0, 2")],
    )  # fmt: skip
    def test_the_kv_cache(
        self, tmp_path: Path, name: str, options: tuple[str, ...], line: str
    ) -> None:
        text = invoke("inspect", model_writer(tmp_path, 0)(name), *options).stdout
        (found,) = re.findall(r"  KV cache +(.*)", text)
        assert found == line

    def test_json_describes_the_model(self, model: Path) -> None:
        report = json.loads(invoke("inspect", model, "--json").stdout)
        assert report["paths"] == [str(model)]
        assert report["n_bytes"] == model.stat().st_size
        assert report["metadata"]["general.architecture"] == "qwen35moe"
        layers = report["layers"]
        assert len(layers) == report["hparams"]["n_layer"]
        assert sum(layer["expert_bytes"] for layer in layers) == report["expert_bytes"]
        assert {layer["recurrent"] for layer in layers} == {True, False}
        assert "tensors" not in report
        assert report["budgets"] == []

    def test_check_looks_at_the_weights(self, model: Path) -> None:
        assert "no NaN and no infinity" in invoke("inspect", model, "--check").stdout
        assert "Check" not in invoke("inspect", model).stdout

    def test_check_names_what_is_damaged(self, tmp_path: Path) -> None:
        path, name = tmp_path / "m.gguf", "output_norm.weight"
        (info,) = (t for t in model_file().tensors if t.name == name)
        values = np.ones(info.ne[0], np.float32)
        values[3:5] = np.nan
        path.write_bytes(model_file(tensors=edit(name, data=values.tobytes())).build())
        for extra in ([], ["--json"]):
            result = invoke("inspect", path, "--check", *extra)
            assert result.exit_code == 3
            assert f"the first is {name}; the file is damaged" in result.stderr
        assert json.loads(result.stdout)["nonfinite"] == [
            {"name": name, "type": "F32", "n_bad": 2, "n_blocks": len(values), "first": 3}
        ]

    def test_what_fits_is_what_plan_says(self, model: Path) -> None:
        settings = ("-c", 1000, "--vram", "100MiB", "--vram", "730MiB", "--vram", "2", "--json")
        budgets = json.loads(invoke("inspect", model, *settings).stdout)["budgets"]
        small, _, large = budgets
        assert (small["budget_bytes"], large["budget_bytes"]) == (100 << 20, 2 << 30)
        assert "less than the 512 MiB that the driver takes" in small["refusal"]
        assert large["plan"]["all_resident"] and large["refusal"] is None
        assert sum(large["plan"]["bytes"].values()) == large["budget_bytes"]
        planned = json.loads(invoke("plan", model, *settings).stdout)["budgets"]
        predicted = ("machine", "predicted", "prompts", "drafters")
        assert [{k: v for k, v in row.items() if k not in predicted} for row in planned] == budgets

    def test_for_people(self, model: Path) -> None:
        result = invoke("inspect", model, "--tensors", "--vram", "2", "--vram", "0.6")
        assert result.stderr == ""
        for part in ("Metadata", "general.architecture", "DeltaNet", "one expert",
                     "In 2.00 GiB, 4,096 positions: all experts resident", "left over",
                     "In 614 MiB, 4,096 positions: does not fit", "without its experts needs",
                     "blk.0.ffn_gate_inp.weight"):  # fmt: skip
            assert part in result.stdout
        assert result.stdout.index("Model") < result.stdout.index("Metadata")

    def test_one_value_of_the_metadata(self, tmp_path: Path) -> None:
        pairs = {**model_pairs(Shape()), **vocab_pairs(Shape().n_vocab)}
        template = "{% for m in messages %}\n" + 100 * "x" + "{% endfor %}"
        for key, text in (("general.name", "a name"), ("tokenizer.chat_template", template)):
            pairs[key] = kv(key, T.STRING, text)
        path = tmp_path / "m.gguf"
        path.write_bytes(model_file(pairs=pairs).build())
        assert invoke("inspect", path, "--key", "general.name").stdout == "a name\n"
        assert invoke("inspect", path, "--key", "general.name", "--json").stdout == '"a name"\n'
        assert invoke("inspect", path, "--template").stdout == template + "\n"
        tokens = json.loads(invoke("inspect", path, "--key", "tokenizer.ggml.tokens").stdout)
        assert len(tokens) == Shape().n_vocab
        result = invoke("inspect", path, "--key", "general.nam")
        assert (result.exit_code, result.stdout) == (2, "")
        assert "no metadata key 'general.nam'; close to it: general.name" in result.stderr

    def test_tensors_by_name(self, model: Path) -> None:
        globs = ("--tensor", "blk.0.*_exps.*", "--tensor", "output*")
        tensors = json.loads(invoke("inspect", model, "--json", *globs).stdout)["tensors"]
        assert {t["name"] for t in tensors} == {
            "blk.0.ffn_gate_exps.weight", "blk.0.ffn_up_exps.weight", "blk.0.ffn_down_exps.weight",
            "output.weight", "output_norm.weight",
        }  # fmt: skip
        result = invoke("inspect", model, "--tensor", "nothing*", "--json")
        assert (result.exit_code, result.stdout) == (2, "")
        assert "no tensor matches 'nothing*'" in result.stderr

    def test_a_file_of_another_architecture_is_shown_and_not_run(self, tmp_path: Path) -> None:
        pairs = {**model_pairs(Shape()), **vocab_pairs(Shape().n_vocab)}
        pairs["general.architecture"] = kv("general.architecture", T.STRING, "llama")
        path = tmp_path / "m.gguf"
        path.write_bytes(model_file(pairs=pairs).build())
        result = invoke("inspect", path, "--tensor", "output*")
        assert result.exit_code == 0
        assert "architecture 'llama' is not supported; moegraph runs" in result.stderr
        assert "output_norm.weight" in result.stdout and "Layers" not in result.stdout
        report = json.loads(invoke("inspect", path, "--json").stdout)
        assert "'llama' is not supported" in report["unsupported"] and report["n_params"] > 0
        assert invoke("inspect", path, "--key", "general.architecture").stdout == "llama\n"
        for option in (("--vram", "8"), ("--check",)):
            result = invoke("inspect", path, *option)
            assert result.exit_code == 3 and "'llama' is not supported" in result.stderr
        pairs["general.architecture"] = kv("general.architecture", T.STRING, "dflash")
        path.write_bytes(model_file(pairs=pairs).build())
        assert "m.gguf: this is a drafter; give the model" in invoke("inspect", path).stderr

    def test_hostile_metadata_cannot_reach_the_terminal(self, tmp_path: Path) -> None:
        pairs = {**model_pairs(Shape()), **vocab_pairs(Shape().n_vocab)}
        pairs["general.name"] = kv("general.name", T.STRING, "\x1b[2J\x07evil\nname")
        pairs["general.odd"] = kv("general.odd", T.FLOAT32, float("nan"))
        path = tmp_path / "m.gguf"
        path.write_bytes(model_file(pairs=pairs).build())
        assert "evil" in invoke("inspect", path).stdout
        report = json.loads(invoke("inspect", path, "--json").stdout)
        assert report["metadata"]["general.odd"] == "nan"

    def test_files_that_are_no_model(self, tmp_path: Path) -> None:
        (tmp_path / "x.gguf").write_bytes(b"not a model")
        for target in (tmp_path / "x.gguf", tmp_path / "none.gguf", tmp_path):
            result = invoke("inspect", target)
            assert result.exit_code == 3
            assert result.stdout == ""
            assert len(result.stderr.splitlines()) == 1
