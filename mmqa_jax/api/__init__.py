"""The names of `import mmqa_jax as mmqa`.

`answers.py` has a corpus, a retriever, a reader and answers that cite their sources; `lists.py`
vectors, rankings, scores and training over lists; `ports.py` the models by themselves, for JAX
code of one's own.
"""
