"""pandas and scikit-learn: read the files, then fit an OrdinalEncoder and a StandardScaler."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))


def main() -> None:
    import pandas as pd  # noqa: PLC0415
    from sklearn.preprocessing import OrdinalEncoder, StandardScaler  # noqa: PLC0415
    from trainer_features_data import DENSE, SPARSE, data_path  # noqa: PLC0415

    path = data_path(is_quick="--quick" in sys.argv)
    pd.read_parquet(path, columns=[SPARSE[0]])  # imports and page cache
    began_s = time.perf_counter()
    frame = pd.read_parquet(path)
    encoder = OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1)
    encoder.fit(frame[list(SPARSE)])
    StandardScaler().fit(frame[list(DENSE)])
    taken_s = time.perf_counter() - began_s
    versions = {"scikit-learn": metadata.version("scikit-learn"), "pandas": metadata.version("pandas")}
    print(json.dumps({"figures": {"sklearn_features_s": taken_s}, "versions": versions}))


if __name__ == "__main__":
    if importlib.util.find_spec("sklearn") is None:
        print(json.dumps({"not_installed": "scikit-learn"}))
    else:
        main()
