"""Atlas: this project's own multimodal benchmark, built from two installed packages.

Flags and emoji of OpenMoji, prose of the World Factbook, questions over both, in WebQA's
official file formats. Its scores are not comparable with WebQA's.
"""
