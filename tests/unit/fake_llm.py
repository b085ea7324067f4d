"""A language model of known answers, behind the interface of a backend."""

from collections.abc import Callable, Iterable, Iterator

from mmqa_jax.decoding.requests import Candidate, Result, Score, Scores, TooLong
from mmqa_jax.prompting.backends import Chat, Choices, Failure, Query, Usage


class FakeLLM:
    """Answers by functions of the prompt's text; fails on the ids it is told to.

    Args:
      say: prompt -> (text, summed log-probability).
      score: (prompt, continuation) -> log-probabilities of its tokens.
      length: characters that a prompt may have.
      fail: ids that get no answer.
      takes_pictures, takes_messages, parameters: as a backend's.
    """

    hides = False

    def __init__(
        self,
        say: Callable[[str], tuple[str, float]] = lambda prompt: ("", 0.0),
        score: Callable[[str, str], tuple[float, ...]] = lambda prompt, option: (-1.0,),
        length: int = 10**6,
        fail: Iterable = (),
        takes_pictures: bool | None = False,
        takes_messages: bool = True,
        parameters: int | None = None,
    ):
        self.parameters = parameters
        self.takes_pictures, self.takes_messages = takes_pictures, takes_messages
        self._say, self._score, self._length, self._fail = say, score, length, set(fail)
        self.usage, self.failures, self.seen = Usage(), [], []

    def fail(self, ids: Iterable) -> None:
        """No more answers to these ids."""
        self._fail |= set(ids)

    def check(self, query: Query) -> None:
        excess = len(self.text(query))
        if excess > self._length:
            raise TooLong(query.id, excess, 0, self._length)

    def rates(self) -> dict[str, float]:
        return {}

    def sizes(self) -> None:
        return None

    def text(self, query: Query) -> str:
        prompt = query.messages if isinstance(query, Chat) else query.prompt
        return prompt if isinstance(prompt, str) else prompt[-1].text

    def answer(self, queries: Iterable[Query]) -> Iterator[Result | Scores]:
        for query in queries:
            self.seen.append(query)
            text = self.text(query)
            if query.id in self._fail:
                self.usage.failures += 1
                self.failures.append(Failure(query.id, "timed out"))
            elif isinstance(query, Choices):
                logprobs = [
                    self._score(text.replace(hidden, "") if hidden else text, option)
                    for hidden in ("", *query.hidden)
                    for option in query.continuations
                ]
                scores = tuple(Score(sum(values), tuple(values), False) for values in logprobs)
                yield Scores(query.id, scores)
            else:
                said, total = self._say(text)
                yield Result(query.id, (Candidate(said, (1,), total, None, "stop"),), 3, 0)
