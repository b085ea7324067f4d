"""Detectors' files whose values are no numbers."""

import re

import numpy as np
import pytest
import torch
from test_regions import ID, detections, picture, regions, write_vinvl, write_x101

from mmqa_jax.core.errors import RunError
from mmqa_jax.data.pictures.decode import BrokenPictures
from mmqa_jax.data.regions import FeatureRegions, VinVLFeatures, X101Features


@pytest.mark.parametrize("kind", ["x101", "vinvl"])
@pytest.mark.parametrize("key", ["fc1_features", "cls_features", "pred_boxes", "scores"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_no_numbers_count_as_missing(tmp_path, kind, key, value):
    classes = {"x101": 1601, "vinvl": 1595}[kind]
    whole, broken = detections(classes=classes), detections(classes=classes)
    broken[key][1] = value
    if kind == "x101":
        write_x101(tmp_path)
        path = write_x101(tmp_path, ID + 1, **{key: torch.tensor(broken[key])})
        made = lambda missing: regions(X101Features(tmp_path), missing=missing)  # noqa: E731
        name = "40001235"
    else:
        path = write_vinvl(tmp_path / "v.tsv", {0: whole, 1: broken})
        reader, ids = VinVLFeatures({0: path}), [0, None, 1]
        made = lambda missing: FeatureRegions(reader, ids, missing=missing)  # noqa: E731
        name = "1"
    counted = BrokenPictures(2, limit=1)
    found = made(counted)
    assert found(picture(0))[0].shape == (3, 2048)
    assert found(picture(2)) is None
    assert found(picture(2)) is None
    assert counted.names == [name]
    assert re.search(rf"{path.name}.* hold NaN or infinity", counted.reasons[name])
    with pytest.raises(RunError, match=rf"1 picture .* 0 allowed \({name}\).*{path.name}"):
        made(BrokenPictures(2, limit=0))(picture(2))
