"""Faster R-CNN as the detectors have it whose regions VLP, Oscar and MCAN read; see README.md."""
