"""An exported model predicts what the Trainer predicts, in a process that has no Strata."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.reference
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from strata import Trainer
from strata.errors import InvalidArgument
from strata.train import DeepFM, DenseFeat, Features, SparseFeat, VarLenFeat
from strata.trainer.exported import Predictor
from tests.integration.trainer_models import Regression, arrays, network

WITHOUT_STRATA = """
import json, sys
sys.modules["strata"] = None  # importing it would fail
sys.path.insert(0, sys.argv[1])
from predict import Predictor
rows = json.load(open(sys.argv[2]))
print(json.dumps(Predictor(sys.argv[1]).predict(rows).tolist()))
"""


@pytest.fixture(autouse=True)
def _in_its_own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def predicted(directory: Path, rows: Any) -> torch.Tensor:
    Path("rows.json").write_text(json.dumps(rows))
    command = [sys.executable, "-I", "-c", WITHOUT_STRATA, str(directory), "rows.json"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return torch.tensor(json.loads(ended.stdout))


def frame(rows: int = 300) -> pd.DataFrame:
    random = np.random.default_rng(0)
    city = random.choice(["bonn", "köln", "paris"], rows)
    return pd.DataFrame(
        {
            "city": city,
            "age": random.normal(40, 10, rows),
            "tags": [" ".join(random.choice(["a", "b", "c"], random.integers(0, 4))) for _ in range(rows)],
            "clicked": ((city == "paris") ^ (random.random(rows) < 0.1)).astype(int),
        }
    )


@pytest.mark.slow
def test_a_model_with_features_predicts_the_same_without_strata(tmp_path: Path) -> None:
    data = frame()
    features = Features.fit(
        data, [SparseFeat("city"), DenseFeat("age"), VarLenFeat("tags", separator=" ", max_length=4)]
    )
    trainer = Trainer(DeepFM, nn.BCEWithLogitsLoss(), "adam", ["auc"], features=features, optimizer_args={"lr": 0.01})
    trainer.fit(data, label="clicked", epochs=3, batch_size=32)
    assert trainer.evaluate(data)["auc"] > 0.8
    rows = {"city": ["paris", "rome", None], "age": [41.5, None, 12.0], "tags": ["a c", "", "z"]}

    directory = trainer.export("model")

    expected = trainer.predict(pd.DataFrame(rows))
    torch.testing.assert_close(predicted(directory, rows), expected, rtol=1e-5, atol=1e-6)
    weights = load_file(directory / "model.safetensors")
    assert weights.keys() == trainer.module.state_dict().keys()
    assert all(torch.equal(weights[name], value) for name, value in trainer.module.state_dict().items())


@pytest.mark.parametrize(
    "kind", ["matrix", pytest.param("columns", marks=pytest.mark.slow), pytest.param("tuple", marks=pytest.mark.slow)]
)
def test_a_model_of_plain_columns_predicts_the_same_without_strata(kind: str) -> None:
    x, y = arrays(20)
    columns = {"a": x[:, 0], "b": x[:, 1], "y": y}
    module: nn.Module = Regression() if kind == "columns" else network(inputs=2 if kind == "matrix" else 4)
    trainer = Trainer(module, nn.BCEWithLogitsLoss(), "sgd")
    if kind == "tuple":
        trainer.fit((x, y), batch_size=5)
        rows: Any = [x.tolist()]
        expected = trainer.predict((x, y))
    else:
        trainer.fit(columns, label="y", batch_size=5, inputs=["a", "b"] if kind == "matrix" else None)
        rows = {"a": x[:, 0].tolist(), "b": x[:, 1].tolist()}
        expected = trainer.predict(columns)

    directory = trainer.export("model")

    torch.testing.assert_close(predicted(directory, rows), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("takes_all", [False, True])
def test_rows_without_a_column_of_the_model_are_refused_by_its_name(*, takes_all: bool) -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Regression()

        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return self.net(batch["a"], batch["b"])

    module = Whole() if takes_all else Regression()
    x, y = arrays(20)
    trainer = Trainer(module, nn.BCEWithLogitsLoss(), "sgd")
    trainer.fit({"a": x[:, 0], "b": x[:, 1], "y": y}, label="y", batch_size=5)

    predictor = Predictor(trainer.export("model"))

    assert len(predictor.predict({"a": [1.0, 2.0], "b": [0.0, 1.0]})) == 2
    with pytest.raises(ValueError, match="column 'b' is missing; found: 'a', 'c'"):
        predictor.predict({"a": [1.0], "c": [2.0]})


def test_an_onnx_file_computes_the_same_for_any_number_of_rows() -> None:
    x, y = arrays(20)
    trainer = Trainer(network(), nn.BCEWithLogitsLoss(), "sgd")
    trainer.fit((x, y), batch_size=5)

    directory = trainer.export("model", onnx=True)

    program = onnx.reference.ReferenceEvaluator(onnx.load(directory / "model.onnx"))
    (found,) = program.run(None, {program.input_names[0]: x.numpy()})
    torch.testing.assert_close(torch.tensor(found), trainer.predict(x), rtol=1e-4, atol=1e-5)


def test_a_module_that_cannot_be_captured_is_exported_without_its_program() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.net(x)
            return out * 2 if out.sum().item() > 0 else out  # depends on values

    trainer = Trainer(Branching(), nn.BCEWithLogitsLoss(), "sgd")
    trainer.fit(arrays(20), batch_size=5)

    directory = trainer.export("model")

    about = json.loads((directory / "model.json").read_text())
    assert not about["has_program"]
    assert about["why_no_program"]
    assert not (directory / "model.pt2").exists()
    assert (directory / "model.safetensors").exists()


def test_an_export_overwrites_nothing_and_needs_a_batch() -> None:
    trainer = Trainer(network(), nn.BCEWithLogitsLoss(), "sgd")
    with pytest.raises(InvalidArgument, match="pass sample= with some rows"):
        trainer.export("model")
    Path("model").mkdir()
    Path("model/mine.txt").write_text("x")
    with pytest.raises(InvalidArgument, match="'model' is not empty; choose a new directory"):
        trainer.export("model", sample=arrays(4))
