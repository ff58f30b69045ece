"""The loader in real training libraries: they do not wrap, shard or skip it, and save its state."""

from __future__ import annotations

import importlib
import io
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from deltalake import write_deltalake
from shared_readers import held, limit
from torch import nn

from strata import DeltaDataset, StructuredDataset
from strata.errors import InvalidArgument

__all__ = ["held", "limit"]  # fixtures

NUM_ROWS = 500
BATCH_SIZE = 64
NUM_BATCHES = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("frameworks")
    first = 0
    for number, num_rows in enumerate([200, 50, 250]):
        ids = np.arange(first, first + num_rows)
        table = pa.table({"id": ids, "x": (ids % 10).astype(np.float32), "labels": (ids % 10 * 2).astype(np.float32)})
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=40)
        first += num_rows
    return folder


def open_loader(folder: Path, **arguments: Any) -> tuple[Any, Any]:
    defaults = {"batch_size": BATCH_SIZE, "num_workers": 1, "shuffle": True, "shuffle_seed": 3, "cache": False}
    return StructuredDataset.create_dataloader(folder, **defaults | arguments)


@pytest.fixture(params=["files", "shared_bytes", "webdataset", "delta"])
def opened(request: pytest.FixtureRequest, folder: Path, tmp_path: Path) -> Callable[[], tuple[Any, Any]]:
    """Open the same rows in each of the modes; returns the loader and the dataset."""
    if request.param == "files":
        return lambda: open_loader(folder)
    if request.param == "shared_bytes":
        held_bytes = request.getfixturevalue("held")
        return lambda: open_loader(folder, shared_bytes=held_bytes)
    if request.param == "webdataset":
        write_shards(folder, tmp_path)
        decode = {"id": "cls", "x": float32, "labels": float32}
        return lambda: open_loader(tmp_path / "shard-{0..2}.tar", format="webdataset", decode=decode)
    for path in sorted(folder.iterdir()):
        write_deltalake(tmp_path / "table", pq.read_table(path), mode="append")
    options: dict[str, Any] = {"batch_size": BATCH_SIZE, "num_workers": 1, "shuffle": True, "shuffle_seed": 3}
    return lambda: DeltaDataset.create_dataloader(tmp_path / "table", **options)


def float32(part: bytes) -> Any:
    return np.array(float(part), np.float32)


def write_shards(folder: Path, target: Path) -> None:
    """Write each file as one shard with a part for each column."""
    for number, path in enumerate(sorted(folder.iterdir())):
        with tarfile.open(target / f"shard-{number}.tar", "w") as shard:
            for row in pq.read_table(path).to_pylist():
                for name, value in row.items():
                    member = tarfile.TarInfo(f"{row['id']:04}.{name}")
                    member.size = len(text := str(value).encode())
                    shard.addfile(member, io.BytesIO(text))


def ids_of(batches: Any) -> list[int]:
    return [number for batch in batches for number in batch["id"].tolist()]


# Accelerate


@pytest.fixture
def accelerate() -> Iterator[Any]:
    """Reset the state, which is global to the process."""
    accelerate = pytest.importorskip("accelerate")
    yield accelerate
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def test_accelerate_prepares_the_loader_without_changing_it(accelerate: Any, folder: Path) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    loader, dataset = open_loader(folder, accelerator=accelerator)
    assert dataset.ranks.found_in == "the accelerator"
    model = nn.Linear(1, 1)
    prepared, _, _ = accelerator.prepare(loader, model, torch.optim.SGD(model.parameters(), lr=0.01))
    assert prepared is loader
    assert accelerator._dataloaders == [loader]
    assert sorted(ids_of(prepared)) == list(range(NUM_ROWS))
    assert len(prepared) == NUM_BATCHES


def test_accelerate_steps_with_the_last_batch_although_its_gradients_are_not_yet_complete(
    accelerate: Any, folder: Path
) -> None:
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=3)
    loader, _ = open_loader(folder)  # without the accelerator, before prepare
    model = nn.Linear(1, 1)
    loader, model, optimizer = accelerator.prepare(loader, model, torch.optim.SGD(model.parameters(), lr=0.01))
    for _ in range(2):
        synced = []
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward((model(batch["x"][:, None]).squeeze(1) - batch["labels"]).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            synced.append(accelerator.sync_gradients)
        assert synced == [False, False, True, False, False, True, False, True]
        assert accelerator.gradient_state.in_dataloader is False


def test_accelerate_leaves_repeated_rows_out_of_metrics(accelerate: Any, folder: Path) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    loader, dataset = open_loader(folder, tail="pad")
    loader = accelerator.prepare(loader)
    batches, gathered = [], []
    for batch in loader:
        batches += batch["id"].tolist()
        gathered += accelerator.gather_for_metrics(batch["id"]).tolist()
    assert len(batches) == NUM_BATCHES * BATCH_SIZE == NUM_ROWS + dataset.get_metrics().padded_rows
    assert sorted(gathered) == list(range(NUM_ROWS))


def test_accelerate_saves_and_restores_the_position(accelerate: Any, folder: Path, tmp_path: Path) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    loader, _ = open_loader(folder, accelerator=accelerator)
    loader = accelerator.prepare(loader)
    whole = [batch["id"].tolist() for batch in loader]
    loader.set_epoch(0)
    for number, _ in enumerate(loader):
        if number == 2:
            accelerator.save_state(str(tmp_path / "saved"))
            break
    accelerator.free_memory()

    fresh, _ = open_loader(folder, accelerator=accelerator, num_workers=2)
    fresh = accelerator.prepare(fresh)
    accelerator.load_state(str(tmp_path / "saved"))
    assert [batch["id"].tolist() for batch in fresh] == whole[3:]


def test_accelerate_skips_batches_without_a_loaded_state(accelerate: Any, folder: Path) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    loader, _ = open_loader(folder)
    loader = accelerator.prepare(loader)
    whole = [batch["id"].tolist() for batch in loader]
    loader.set_epoch(0)
    rest = accelerator.skip_first_batches(loader, 5)
    assert [batch["id"].tolist() for batch in rest] == whole[5:]


# Lightning


LIGHTNING_WARNINGS = [
    # Lightning's warnings about its own defaults or its own use of torch; none is caused by Strata.
    "ignore:.*does not have many workers.*",
    "ignore:.*has `__len__` defined.*",
    "ignore:.*Checkpoint directory .* exists and is not empty.*",
    "ignore:.*You're resuming from a checkpoint that ended before the epoch ended.*",
    "ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning",
    "ignore:.*:DeprecationWarning",
    "ignore:.*GPU available but not used.*",
    "ignore:.*is in beta.*",
    "ignore:.*callbacks used to create the checkpoint need to be provided.*",
]


def quiet(test: Any) -> Any:
    for pattern in LIGHTNING_WARNINGS:
        test = pytest.mark.filterwarnings(pattern)(test)
    return test


def lightning_module(lightning: Any) -> Any:
    class Fit(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1)
            self.seen: dict[int, list[int]] = {}

        def training_step(self, batch: Any, number: int) -> Any:
            self.seen.setdefault(self.current_epoch, []).extend(batch["id"].tolist())
            return (self.layer(batch["x"][:, None]).squeeze(1) - batch["labels"]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.001)

    return Fit()


def lightning_trainer(lightning: Any, folder: Path, **arguments: Any) -> Any:
    defaults = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return lightning.Trainer(default_root_dir=folder, **defaults | arguments)


@quiet
def test_lightning_sees_every_row_once_per_epoch(folder: Path, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    loader, _ = open_loader(folder)
    module = lightning_module(lightning)
    trainer = lightning_trainer(lightning, tmp_path, max_epochs=2, enable_checkpointing=False)
    trainer.fit(module, loader)
    assert trainer.global_step == 2 * NUM_BATCHES
    assert sorted(module.seen) == [0, 1]
    assert all(sorted(ids) == list(range(NUM_ROWS)) for ids in module.seen.values())


@quiet
def test_lightning_sees_another_order_in_every_epoch(folder: Path, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    expected_loader, _ = open_loader(folder)
    expected = [ids_of(expected_loader) for _ in range(3)]
    module = lightning_module(lightning)
    loader, _ = open_loader(folder)
    lightning_trainer(lightning, tmp_path, max_epochs=3, enable_checkpointing=False).fit(module, loader)
    assert [module.seen[epoch] for epoch in range(3)] == expected


@quiet
def test_lightning_saves_the_position_in_its_checkpoint_and_resumes_from_it(
    opened: Callable[[], tuple[Any, Any]], tmp_path: Path
) -> None:
    lightning = pytest.importorskip("lightning")
    expected_loader, _ = opened()
    expected = [batch["id"].tolist() for batch in expected_loader]

    begun = lightning_module(lightning)
    keep = lightning.pytorch.callbacks.ModelCheckpoint(
        dirpath=tmp_path, filename="middle", every_n_train_steps=5, save_top_k=-1
    )
    loader, _ = opened()
    lightning_trainer(lightning, tmp_path, max_steps=6, callbacks=[keep]).fit(begun, loader)
    saved = torch.load(tmp_path / "middle.ckpt", weights_only=True)
    states = saved["loops"]["fit_loop"]["state_dict"]["combined_loader"]
    assert [(state["epoch"], state["position"]) for state in states] == [(0, 5 * BATCH_SIZE)]

    resumed = lightning_module(lightning)
    fresh, _ = opened()
    trainer = lightning_trainer(lightning, tmp_path, max_epochs=2, enable_checkpointing=False)
    trainer.fit(resumed, fresh, ckpt_path=tmp_path / "middle.ckpt", weights_only=True)
    assert begun.seen[0] == [number for ids in expected[:6] for number in ids]
    assert resumed.seen[0] == [number for ids in expected[5:NUM_BATCHES] for number in ids]
    assert sorted(resumed.seen[1]) == list(range(NUM_ROWS))
    assert trainer.global_step == 2 * NUM_BATCHES


# transformers


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor, **others: torch.Tensor) -> dict[str, Any]:
        self.seen += others["id"].tolist()
        return {"loss": (self.layer(x[:, None]).squeeze(1) - labels).square().mean()}


def train(
    transformers: Any,
    folder: Path,
    saved: Path,
    *,
    resume_at: int = 0,
    keeps: bool = True,
    at_once: bool = False,
    accumulate: int = 1,
) -> list[int]:
    """Train up to three epochs with the transformers Trainer and return the ids that the model saw."""
    hf = importlib.import_module("strata.data.hf")
    loader, _ = open_loader(folder)

    class Trainer(transformers.Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            return loader

    arguments = transformers.TrainingArguments(
        output_dir=str(saved),
        num_train_epochs=3,
        use_cpu=True,
        report_to=[],
        save_strategy="steps",
        save_steps=1 if not resume_at else 1000,
        logging_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
        ignore_data_skip=at_once,
        gradient_accumulation_steps=accumulate,
    )
    model = Model()
    trainer = Trainer(model=model, args=arguments, callbacks=[hf.KeepState()] if keeps else [])
    trainer.train(resume_from_checkpoint=str(saved / f"checkpoint-{resume_at}") if resume_at else None)
    assert trainer.state.global_step == 3 * -(-NUM_BATCHES // accumulate)
    return model.seen


def quiet_transformers(test: Any) -> Any:
    for pattern in (
        "ignore::FutureWarning",  # warnings of transformers and torch about each other
        "ignore::DeprecationWarning",
        "ignore:.*pin_memory.*no accelerator is found.*:UserWarning",
    ):
        test = pytest.mark.filterwarnings(pattern)(test)
    return test


@quiet_transformers
@pytest.mark.usefixtures("accelerate")
def test_the_transformers_trainer_sees_every_row_once_per_epoch_and_resumes_in_any_epoch(
    folder: Path, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    whole = train(transformers, folder, tmp_path)
    epochs = [whole[first : first + NUM_ROWS] for first in range(0, 3 * NUM_ROWS, NUM_ROWS)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(NUM_ROWS))] * 3
    assert epochs[0] != epochs[1] != epochs[2]
    # In the first epoch, at its end, in the second, at the beginning and the end of the third.
    for step in (5, NUM_BATCHES, NUM_BATCHES + 2, 2 * NUM_BATCHES + 1, 3 * NUM_BATCHES - 1):
        epoch, batches = divmod(step, NUM_BATCHES)
        expected = whole[epoch * NUM_ROWS + batches * BATCH_SIZE :]
        for at_once in (False, True):
            assert train(transformers, folder, tmp_path, resume_at=step, at_once=at_once) == expected, (step, at_once)


@quiet_transformers
@pytest.mark.usefixtures("accelerate")
def test_the_trainer_resumes_in_a_later_epoch_while_it_accumulates_gradients(folder: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    whole = train(transformers, folder, tmp_path, accumulate=3)  # 3, 3 and 2 batches of an epoch
    expected = whole[NUM_ROWS + 3 * BATCH_SIZE :]
    assert train(transformers, folder, tmp_path, resume_at=4, accumulate=3) == expected


@quiet_transformers
@pytest.mark.usefixtures("accelerate")
def test_a_checkpoint_without_a_position_is_resumed_by_skipping_batches(folder: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    whole = train(transformers, folder, tmp_path, keeps=False)
    expected = whole[NUM_ROWS + 2 * BATCH_SIZE :]
    assert train(transformers, folder, tmp_path, resume_at=NUM_BATCHES + 2) == expected
    with pytest.raises(InvalidArgument, match="saved without KeepState"):
        train(transformers, folder, tmp_path, resume_at=NUM_BATCHES + 2, at_once=True)


@quiet_transformers
@pytest.mark.usefixtures("accelerate")
def test_a_foreign_loader_has_no_state_to_keep(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    hf = importlib.import_module("strata.data.hf")
    rows = [{"x": torch.tensor(1.0), "labels": torch.tensor(2.0), "id": torch.tensor(3)}] * 4
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True)
    trainer = transformers.Trainer(model=Model(), args=arguments, train_dataset=rows, callbacks=[hf.KeepState()])
    with pytest.raises(InvalidArgument, match="KeepState needs a loader from create_dataloader"):
        trainer.train()


# torchdata


def test_the_loader_has_the_state_protocol_of_torchdata(folder: Path) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader.stateful")
    loader, dataset = open_loader(folder)
    assert isinstance(loader, stateful.Stateful)
    assert isinstance(dataset, stateful.Stateful)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata asks torch for it
def test_a_torchdata_loader_over_the_dataset_resumes_at_the_same_row(opened: Callable[[], tuple[Any, Any]]) -> None:
    stateful_dataloader = pytest.importorskip("torchdata.stateful_dataloader")
    _, dataset = opened()
    theirs = stateful_dataloader.StatefulDataLoader(dataset, batch_size=None)
    batches = iter(theirs)
    begun = [next(batches)["id"].tolist() for _ in range(3)]
    state = theirs.state_dict()
    _, fresh = opened()
    resumed = stateful_dataloader.StatefulDataLoader(fresh, batch_size=None)
    resumed.load_state_dict(state)
    rest = [batch["id"].tolist() for batch in resumed]
    assert sorted(number for ids in begun + rest for number in ids) == list(range(NUM_ROWS))
