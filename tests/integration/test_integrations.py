"""Callbacks for frameworks, in this process: errors, and exact resumes at any point of a loop.

`tests/fault/test_run_frameworks.py` kills and scales whole runs.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import strata
from strata.errors import ConfigError, InvalidArgument
from strata.integrations import resume

NUM_ROWS = 88
BATCH_SIZE = 8
NUM_BATCHES = 11  # batches of an epoch; 3, 3, 3 and 2 of them make a step
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # warnings of the frameworks about themselves and each other
    pytest.mark.timeout(120),
]


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {"x": torch.tensor([number / NUM_ROWS]), "labels": torch.tensor([number % 7 / 7])}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.3), nn.Linear(8, 1))

    def forward(self, x: Any, labels: Any, **_: Any) -> dict[str, Any]:
        out = self.layers(x.float().reshape(-1, 1))
        return {"loss": (out - labels.float().reshape(-1, 1)).square().mean()}


class Killed(Exception):
    """Raised in place of a signal."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    ids = np.arange(NUM_ROWS)
    pq.write_table(pa.table({"x": ids / NUM_ROWS, "labels": ids % 7 / 7}), "rows.parquet", row_group_size=20)
    yield tmp_path
    accelerate = importlib.import_module("accelerate")  # its state is global to the process
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def weights(module: nn.Module) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in module.state_dict().values()]


def saved_step(checkpoints: str) -> int:
    with strata.CheckpointManager(checkpoints) as manager:
        latest = manager.latest()
    assert latest is not None
    return latest.step


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, ours, theirs))


# -- Lightning ---------------------------------------------------------------------------------------------------------


def fit(
    checkpoints: str, make_loader: Any, *, die_at: int = -1, stop_at: int = -1, **options: Any
) -> tuple[list[torch.Tensor], list[Any]]:
    """Train two epochs, or until the step at which it dies or stops; return weights and validated steps."""
    lightning = pytest.importorskip("lightning")
    ours = importlib.import_module("strata.integrations.lightning")
    validated = []

    class Fit(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, _: int) -> Any:
            return self.net(**batch)["loss"]

        def validation_step(self, batch: Any, _: int) -> None:
            self.log("val", self.net(**batch)["loss"])

        def on_validation_end(self) -> None:
            validated.append(self.trainer.global_step)

        def on_train_batch_end(self, *_: Any) -> None:
            if self.trainer.global_step == die_at:
                raise Killed
            if self.trainer.global_step == stop_at:
                self.trainer.should_stop = True

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val"}}

    torch.manual_seed(11)
    with strata.init(checkpoints=checkpoints, every=2) as ctx:
        module = Fit()
        trainer = lightning.Trainer(
            **{"max_epochs": 2, "accelerator": "cpu", "logger": False, **options},
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            callbacks=[ours.StrataCallback(ctx)],
        )
        try:
            trainer.fit(module, make_loader(ctx), DataLoader(Rows(), batch_size=44))
        except Killed:
            ctx.checkpoints.wait()
        return weights(module), validated


def our_loader(ctx: Any) -> Any:
    return ctx.dataloader("rows.parquet", batch_size=BATCH_SIZE, shuffle=True)


def map_loader(ctx: Any) -> Any:
    return ctx.dataloader(Rows(), batch_size=BATCH_SIZE, shuffle=True)


def stateful_loader(_: Any) -> Any:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    return stateful.StatefulDataLoader(Rows(), batch_size=BATCH_SIZE, shuffle=True)


@pytest.mark.slow
@pytest.mark.parametrize("make_loader", [our_loader, map_loader, stateful_loader])
@pytest.mark.parametrize(
    ("die_at", "restored", "options"),
    [
        (7, 6, {}),  # in the first epoch
        (12, 12, {}),  # at its end: 11 is not a multiple of 2, and 12 is the first step of the second epoch
        (19, 18, {}),
        (7, 6, {"accumulate_grad_batches": 3}),  # 4 steps an epoch, the last one of 2 batches
        (5, 4, {"accumulate_grad_batches": 3}),  # saved at the end of the first epoch, after validation
        (5, 4, {"accumulate_grad_batches": 3, "max_epochs": None, "max_steps": 8}),
    ],
)
@pytest.mark.usefixtures("place")
def test_lightning_resumes_exactly_in_any_part_of_a_loop(
    make_loader: Any, die_at: int, restored: int, options: dict[str, Any]
) -> None:
    expected, validated = fit("calm", make_loader, **options)
    fit("killed", make_loader, die_at=die_at, **options)
    assert saved_step("killed") == restored
    ended, validated_again = fit("killed", make_loader, **options)
    assert same(ended, expected)
    assert validated_again == [step for step in validated if step > restored]


@pytest.mark.parametrize("make_loader", [our_loader, map_loader, stateful_loader])
@pytest.mark.usefixtures("place")
def test_lightning_resumes_exactly_from_the_last_step_of_a_fit(make_loader: Any) -> None:
    expected, _ = fit("calm", make_loader)
    fit("longer", make_loader, max_epochs=1)
    assert saved_step("longer") == NUM_BATCHES  # 11 is not a multiple of 2
    ended, validated = fit("longer", make_loader)
    assert same(ended, expected)
    assert validated == [2 * NUM_BATCHES]


@pytest.mark.parametrize("ending", [{"max_epochs": 1}, {"max_steps": 5}, {"stop_at": 5}, {"stop_at": 6}])
@pytest.mark.usefixtures("place")
def test_a_fit_that_has_ended_is_not_trained_any_further(ending: dict[str, int]) -> None:
    expected, _ = fit("ended", our_loader, **ending)
    assert saved_step("ended") == (NUM_BATCHES if "max_epochs" in ending else max(ending.values()))
    again, validated = fit("ended", our_loader, **{name: value for name, value in ending.items() if name != "stop_at"})
    assert same(again, expected)
    assert validated == []


@pytest.mark.usefixtures("place")
def test_lightning_may_not_train_on_a_loader_without_a_state() -> None:
    with pytest.raises(InvalidArgument, match=r"a DataLoader has no state.*train on a loader of ctx.dataloader"):
        fit("refused", lambda _: DataLoader(Rows(), batch_size=BATCH_SIZE))


# -- transformers ------------------------------------------------------------------------------------------------------


def train(
    checkpoints: str,
    *,
    die_at: int = -1,
    stop_at: int = -1,
    make_loader: Any = None,
    starts_plainly: bool = False,
    **options: Any,
) -> tuple[list[torch.Tensor], list[int]]:
    """Train two epochs, or until the step at which it dies or stops; return weights and evaluated steps."""
    transformers = pytest.importorskip("transformers")
    ours = importlib.import_module("strata.integrations.transformers")
    evaluated = []

    class Watch(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == die_at:
                raise Killed
            if state.global_step == stop_at:
                control.should_training_stop = True

        def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            evaluated.append(state.global_step)

    torch.manual_seed(11)
    with strata.init(checkpoints=checkpoints, every=2) as ctx:
        model = Net()
        arguments = transformers.TrainingArguments(
            **{"output_dir": "out", "num_train_epochs": 2, "per_device_train_batch_size": BATCH_SIZE, **options},
            learning_rate=0.01,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        callback = ours.StrataCallback(ctx, loader=make_loader(ctx) if make_loader else None)
        data = {} if make_loader else {"train_dataset": Rows()}
        trainer = transformers.Trainer(
            model=model, args=arguments, eval_dataset=Rows(), callbacks=[callback, Watch()], **data
        )
        try:
            trainer.train() if starts_plainly else callback.train(trainer)
        except Killed:
            ctx.checkpoints.wait()
        return weights(model), evaluated


@pytest.mark.slow
@pytest.mark.parametrize("make_loader", [None, our_loader, map_loader])
@pytest.mark.parametrize(
    ("die_at", "restored", "options"),
    [
        (7, 6, {}),
        (12, 12, {}),
        (7, 6, {"gradient_accumulation_steps": 3}),  # the last step of an epoch is of 2 batches
        # Step 4 ends the first epoch, so what is due then is saved after step 5.
        (5, 5, {"gradient_accumulation_steps": 3, "eval_strategy": "epoch"}),
        # Steps 6 and 12 are followed by an evaluation.
        (6, 4, {"eval_strategy": "steps", "eval_steps": 6}),
        (13, 13, {"eval_strategy": "steps", "eval_steps": 6}),
    ],
)
@pytest.mark.usefixtures("place")
def test_the_trainer_resumes_exactly_in_any_part_of_a_loop(
    make_loader: Any, die_at: int, restored: int, options: dict[str, Any]
) -> None:
    expected, evaluated = train("calm", make_loader=make_loader, **options)
    train("killed", die_at=die_at, make_loader=make_loader, **options)
    assert saved_step("killed") == restored
    ended, evaluated_again = train("killed", make_loader=make_loader, **options)
    assert same(ended, expected)
    assert evaluated_again == [step for step in evaluated if step > restored]


@pytest.mark.parametrize("make_loader", [None, our_loader, map_loader])
@pytest.mark.parametrize("steps", [5, NUM_BATCHES])
@pytest.mark.usefixtures("place")
def test_the_trainer_resumes_exactly_from_the_last_step(make_loader: Any, steps: int) -> None:
    options = {"make_loader": make_loader, "lr_scheduler_type": "constant"}
    expected, _ = train("calm", max_steps=15, **options)
    train("longer", max_steps=steps, **options)
    assert saved_step("longer") == steps
    ended, _ = train("longer", max_steps=15, **options)
    assert same(ended, expected)


@pytest.mark.parametrize("ending", [{"num_train_epochs": 1}, {"max_steps": 5}, {"stop_at": 5}, {"stop_at": 6}])
@pytest.mark.usefixtures("place")
def test_a_training_that_has_ended_is_not_trained_any_further(ending: dict[str, int]) -> None:
    options = {"eval_strategy": "epoch"}
    expected, evaluated = train("ended", **ending, **options)
    (step,) = evaluated
    assert saved_step("ended") == step
    kept = {name: value for name, value in ending.items() if name != "stop_at"}
    again, evaluated = train("ended", **kept, **options)
    assert same(again, expected)
    assert evaluated == []


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"starts_plainly": True}, "start training with callback.train"),
        ({"ignore_data_skip": True}, "ignore_data_skip would repeat"),
        ({"accelerator_config": {"use_seedable_sampler": False}}, "in another order"),
        ({"resume_from_checkpoint": "out"}, "leave out resume_from_checkpoint"),
    ],
)
@pytest.mark.usefixtures("place")
def test_the_trainer_may_not_be_started_so_that_rows_would_be_repeated(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        train("refused", **options)


# -- Accelerate --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("place")
def test_accelerate_stops_at_optimizer_steps_and_may_not_prepare_a_loader_without_a_state() -> None:
    accelerate = pytest.importorskip("accelerate")
    ours = importlib.import_module("strata.integrations.accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=3)
    with strata.init(checkpoints="saved", every=1) as ctx:
        model = Net()
        model, optimizer, loader = accelerator.prepare(model, torch.optim.Adam(model.parameters()), our_loader(ctx))
        loop = ours.StrataLoop(accelerator, ctx)
        assert loop.restore().is_fresh
        steps = []
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()
            loop.step()
            steps.append(ctx.step)
        assert steps == [0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 4]
        accelerator.prepare(DataLoader(Rows()))
        with pytest.raises(InvalidArgument, match="use_stateful_dataloader=True"):
            loop.restore()


# -- all of them -------------------------------------------------------------------------------------------------------


def test_only_the_same_world_size_resumes_from_a_frameworks_own_loader() -> None:
    resume.FixedWorldSize(3).load_state_dict(resume.FixedWorldSize(3).state_dict())
    with pytest.raises(ConfigError, match=r"3 workers saved the checkpoint.*strata resume --workers 3"):
        resume.FixedWorldSize(2).load_state_dict(resume.FixedWorldSize(3).state_dict())


@pytest.mark.parametrize(("left", "accumulate", "done"), [(10, 1, 0), (4, 1, 6), (4, 3, 6), (0, 2, 10)])
def test_the_rest_of_an_epoch_determines_the_completed_batches(left: int, accumulate: int, done: int) -> None:
    assert resume.batches_done(Left(left), accumulate=accumulate) == done


@pytest.mark.parametrize(("left", "accumulate"), [(5, 3), (11, 1)])
def test_an_epoch_without_whole_steps_is_refused(left: int, accumulate: int) -> None:
    with pytest.raises(ConfigError, match="resume with the number of workers that saved"):
        resume.batches_done(Left(left), accumulate=accumulate)


class Left:
    """A loader of 10 batches an epoch."""

    def __init__(self, left: int) -> None:
        self.num_batches_left = left

    def __len__(self) -> int:
        return 10
