"""Reference models for recommendation, with the structure of their papers.

| Model | Paper |
|---|---|
| `LR` | logistic regression |
| `FM` | Factorization Machines (Rendle, 2010) |
| `FNN` | Deep Learning over Multi-field Categorical Data (Zhang et al., 2016); `FNN.from_fm` pretrains |
| `PNN` | Product-based Neural Networks (Qu et al., 2016): inner, outer, both |
| `WideDeep` | Wide & Deep Learning (Cheng et al., 2016); also as `WideAndDeep` |
| `DeepFM` | DeepFM (Guo et al., 2017) |
| `DCNv2` | DCN V2 (Wang et al., 2021): parallel or stacked, full-rank, low-rank, mixture of experts |
| `DLRM` | Deep Learning Recommendation Model (Naumov et al., 2019) |
| `TwoTower` | two-tower retrieval, with `in_batch_softmax` and its log-q correction (Yi et al., 2019) |

`Model(fields)` takes the fields of fitted features, and `forward(batch)` returns logits `[rows]` for an encoded batch;
`fields` describes both. `embedding` and `layers` hold what the models share. The folder imports torch and the errors,
never the feature columns or pyarrow, and knows nothing of training: any loop can train these modules.
"""

from __future__ import annotations

from strata.trainer.models.dcn import DCNv2
from strata.trainer.models.dlrm import DLRM
from strata.trainer.models.fields import FieldSpec
from strata.trainer.models.fm import FM, FNN, LR, DeepFM
from strata.trainer.models.pnn import PNN
from strata.trainer.models.recommender import Recommender
from strata.trainer.models.two_tower import InBatchSoftmax, TwoTower, in_batch_softmax
from strata.trainer.models.wide_deep import WideAndDeep, WideDeep

__all__ = [
    "DLRM",
    "FM",
    "FNN",
    "LR",
    "PNN",
    "DCNv2",
    "DeepFM",
    "FieldSpec",
    "InBatchSoftmax",
    "Recommender",
    "TwoTower",
    "WideAndDeep",
    "WideDeep",
    "in_batch_softmax",
]
