"""Pytrees under plain names: `encoder/layers/query/kernel` instead of key-path objects.

Checkpoints, messages and regular expressions over parameters all use these names, so that
none of them depends on how Flax or Optax wrap an array.
"""

from collections.abc import Iterable, Mapping
from typing import Any


def name_of(key_path: tuple[Any, ...]) -> str:
    """The name of a leaf from its jax key path; the `value` that Flax Variables add is dropped."""
    import jax

    keys = list(key_path)
    if len(keys) > 1 and keys[-1] == jax.tree_util.GetAttrKey("value"):
        keys.pop()
    return jax.tree_util.keystr(tuple(keys), simple=True, separator="/")


def flatten_named(tree: Any) -> dict[str, Any]:
    """The leaves of a pytree by name, in the tree's order; names are unique."""
    import jax

    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    named = {name_of(path): leaf for path, leaf in leaves}
    assert len(named) == len(leaves), "two leaves of one pytree have the same name"
    return named


def unflatten_named(like: Any, named: dict[str, Any]) -> Any:
    """Puts named leaves back into the structure of `like` (inverse of `flatten_named`)."""
    import jax

    return jax.tree_util.tree_map_with_path(lambda path, _: named[name_of(path)], like)


def nest(named: Mapping[str, Any]) -> dict[str, Any]:
    """`{"a/b": x}` -> `{"a": {"b": x}}`: the form Orbax stores under readable names."""
    nested: dict[str, Any] = {}
    for name, leaf in named.items():
        *sections, last = name.split("/")
        inner = nested
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[last] = leaf
    return nested


def unnest(nested: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """The leaves `names` of a nested tree by name (inverse of `nest`)."""

    def get(name: str) -> Any:
        leaf = nested
        for section in name.split("/"):
            leaf = leaf[section]
        return leaf

    return {name: get(name) for name in names}
