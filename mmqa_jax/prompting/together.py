"""An engine over the processes of a launch: all compute what process 0 asks for.

Its mesh has devices of all of them, so that each runs the same programs in the same order. What is
to be answered only process 0 knows: it alone has the parts that are finished, the response cache
and the file that is written. It tells the others the queries of each call before it makes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from mmqa_jax.core import distributed
from mmqa_jax.core.errors import UserError
from mmqa_jax.decoding.requests import Result, Scores
from mmqa_jax.prompting.backends import Around, Backend, Query

_NAME = "queries"


def leads(what: Any) -> bool:
    """Whether this is process 0."""
    if any(other != what for other in distributed.gather("what is asked", what)):
        raise UserError(
            "--prompts, --model: the processes of this launch were given different ones, though "
            "model.mesh spans them all; give all the same."
        )
    return distributed.process_index() == 0


class Leading(Around):
    """The backend of process 0, whose calls the others follow; see backends.Backend.

    Args:
      queries: all that may be asked for, the same as the others `follow` with.
    """

    def __init__(self, backend: Backend, queries: Sequence[Query]):
        super().__init__(backend)
        self._places = {query.id: place for place, query in enumerate(queries)}

    def answer(self, queries: Iterable[Query]) -> Iterator[Result | Scores]:
        """The backend's; to be read to its end, as the others do."""
        queries = list(queries)
        distributed.gather(_NAME, [self._places[query.id] for query in queries])
        yield from self._backend.answer(queries)

    def end(self) -> None:
        """Lets the others go: no more is asked."""
        distributed.gather(_NAME, None)


def follow(backend: Backend, queries: Sequence[Query]) -> None:
    """Computes what process 0 answers with `Leading`, until it ends; the answers are its own."""
    while (places := distributed.gather(_NAME, None)[0]) is not None:
        for _ in backend.answer([queries[place] for place in places]):
            pass
