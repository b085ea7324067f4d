"""Real data that lies beside the checkout; the tests that read it are skipped where it does not."""

from __future__ import annotations

import os
from pathlib import Path

SHARED = Path(os.environ.get("MMQA_SHARED_DATA", Path(__file__).parents[2] / "../shared/data"))
GOLDEN = SHARED / "webqa_golden"
# The official validation outputs of VLP X101-FPN.
IMAGE_TSV = GOLDEN / "img_queries_VLP_x101fpn_combinedTraining_val_beam5_img_step11_cleaned.tsv"
