"""Train a small model from Parquet, stop in the middle of an epoch, and resume at the next row.

python examples/train_from_parquet.py                creates a small dataset of clicks first
python examples/train_from_parquet.py PATH           uses your data, with columns price, country, items and clicked
"""

import sys
import tempfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from strata import StructuredDataset


def write_clicks(directory: str) -> str:
    random = np.random.default_rng(0)
    for file, num_rows in enumerate([6_000, 1_000, 3_000]):
        items = [random.integers(1_000, size=n).tolist() for n in random.integers(6, size=num_rows)]
        country, price = random.choice(["de", "fr", "it"], num_rows), random.random(num_rows, np.float32)
        columns = {"price": price, "country": country, "items": items, "clicked": (price < 0.5).astype(np.float32)}
        pq.write_table(pa.table(columns), f"{directory}/{file}.parquet", row_group_size=500)
    return directory


class Net(torch.nn.Module):
    def __init__(self, num_countries: int) -> None:
        super().__init__()
        self.countries = torch.nn.Embedding(num_countries, 4, padding_idx=0)
        self.items = torch.nn.EmbeddingBag(1_000, 8)
        self.head = torch.nn.Linear(13, 1)

    def forward(self, batch: dict) -> torch.Tensor:
        parts = [self.countries(batch["country"]), self.items(*batch["items"]), batch["price"][:, None]]
        return self.head(torch.cat(parts, dim=1)).squeeze(1)


with tempfile.TemporaryDirectory() as temporary:
    path = sys.argv[1] if len(sys.argv) > 1 else write_clicks(temporary)
    model = state = None
    for stop_at in (30, None):  # the second pass resumes as after a crash: new loader, saved state
        options = {"batch_size": 128, "shuffle": True, "strings": {"country": "codes"}}
        loader, dataset = StructuredDataset.create_dataloader(path, **options)
        if state is not None:
            loader.load_state_dict(state)  # small, plain JSON
        model = model or Net(dataset.vocabulary("country").num_codes)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        for step, batch in enumerate(loader, start=1):
            loss = binary_cross_entropy_with_logits(model(batch), batch["clicked"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step == stop_at:
                break
        state = loader.state_dict()
        print(f"{step} batches, now at row {dataset.position} of {dataset.plan.num_rows}, loss {loss.item():.3f}")
