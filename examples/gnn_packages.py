"""Predict the section of Debian packages from their descriptions and their neighbors in the package graph.

    python examples/gnn_packages.py           about a minute
    python examples/gnn_packages.py --full    more neighbors per package, more epochs

The graph is what apt knows: an edge is a dependency, a recommendation or a suggestion. Without apt, it is the installed
packages of dpkg; without either, a made-up graph. A network without edges shows what the neighbors contribute.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import nn

from strata import Trainer
from strata.trainer.graph import Graph, GraphSage, NeighborDataset

NUM_WORDS = 256
"""Buckets that the words of descriptions are hashed into."""
MIN_PACKAGES = 100
RELATIONS = ("Depends", "Pre-Depends", "Recommends", "Suggests")
Rows = tuple[Graph, np.ndarray, np.ndarray, np.ndarray]
"""The graph, and for each node: its features, its class, and a number from 0 to 9 that splits the nodes."""


def read_packages() -> list[dict[str, str]]:
    """Return the fields of all packages that apt, or else dpkg, knows."""
    status, text = Path("/var/lib/dpkg/status"), ""
    if apt_cache := shutil.which("apt-cache"):
        dump = subprocess.run([apt_cache, "dumpavail"], capture_output=True, check=False).stdout
        text = dump.decode("utf-8", errors="replace")
    if not text and status.exists():
        text = status.read_text(encoding="utf-8", errors="replace")
    packages = [dict(re.findall(r"^([\w-]+): (.*)$", entry, re.MULTILINE)) for entry in text.split("\n\n")]
    return [each for each in packages if {"Package", "Section", "Description"} <= each.keys()]


def package_graph(packages: list[dict[str, str]]) -> Rows:
    """Return the packages as a graph. All packages of one source are in the same split."""
    ids = {package["Package"]: node for node, package in enumerate(packages)}
    features = np.zeros((len(packages), NUM_WORDS + 1), np.float32)
    edges = []
    for node, package in enumerate(packages):
        for word in re.findall(r"[a-z+]+", package["Description"].lower()):
            features[node, zlib.crc32(word.encode()) % NUM_WORDS] = 1.0
        features[node, NUM_WORDS] = np.log1p(float(package.get("Installed-Size", 0))) / 10
        names = re.findall(r"[\w.+-]+", ",".join(package.get(relation, "") for relation in RELATIONS))
        edges += [(ids[name], node) for name in names if name in ids]
    sources, targets = np.array(edges, np.int64).reshape(-1, 2).T
    sections = np.array([package["Section"].split("/")[-1] for package in packages])
    origins = [package.get("Source", package["Package"]).split()[0] for package in packages]
    splits = np.array([zlib.crc32(origin.encode()) % 10 for origin in origins])
    graph = Graph.from_edges(sources, targets, len(packages), undirected=True)
    return graph, features, np.unique(sections, return_inverse=True)[1], splits


def made_up_graph(num_nodes: int = 2_000, num_classes: int = 8) -> Rows:
    """Return a graph whose edges mostly connect nodes of one class; features alone say little about the class."""
    random = np.random.default_rng(0)
    labels = random.integers(0, num_classes, num_nodes)
    noise = random.normal(size=(num_nodes, num_classes))
    features = (np.eye(num_classes)[labels] + noise).astype(np.float32)
    sources, targets = random.integers(0, num_nodes, (2, 40 * num_nodes))
    kept = random.random(len(sources)) < np.where(labels[sources] == labels[targets], 0.8, 0.05)
    graph = Graph.from_edges(sources[kept], targets[kept], num_nodes, undirected=True)
    return graph, features, labels, random.integers(0, 10, num_nodes)


def main() -> None:
    is_full = "--full" in sys.argv
    packages = read_packages()
    graph, features, labels, splits = package_graph(packages) if len(packages) >= MIN_PACKAGES else made_up_graph()
    num_classes, width = int(labels.max()) + 1, features.shape[1]
    train, test = np.flatnonzero(splits > 1), np.flatnonzero(splits <= 1)
    epochs = 5 if is_full else max(1, 10_000 // len(train))
    print(f"{graph}, {num_classes} classes, {len(train)} nodes to train on, {len(test)} to test")

    def accuracy(module: nn.Module, train_data: object, test_data: object) -> float:
        with tempfile.TemporaryDirectory() as directory:
            trainer = Trainer(
                module,
                loss=nn.CrossEntropyLoss(),
                optimizer=torch.optim.Adam,
                optimizer_args={"lr": 0.01},
                metrics=["accuracy"],
                checkpoints=directory,
            )
            trainer.fit(train_data, label="y", epochs=epochs, batch_size=256)
            return float(trainer.evaluate(test_data)["accuracy"])

    def neighborhoods(seeds: np.ndarray) -> NeighborDataset:
        return NeighborDataset(graph, seeds, labels=labels, features=features, fanouts=(15, 10) if is_full else (5, 3))

    def rows(nodes: np.ndarray) -> dict[str, np.ndarray]:
        return {"input": features[nodes], "y": labels[nodes]}

    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(width, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, num_classes))
    print(f"without edges: accuracy {accuracy(mlp, rows(train), rows(test)):.3f}")
    sage = GraphSage(width, num_classes, hidden=(128,), dropout=0.2)
    print(f"with edges:    accuracy {accuracy(sage, neighborhoods(train), neighborhoods(test)):.3f}")


if __name__ == "__main__":
    main()
