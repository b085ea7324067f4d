"""A TFDS dataset written shard by shard, in any order, with the same bytes every time.

tfds.core.SequentialWriter writes the same files, but only in order and with the fields of an
example in an order that changes from process to process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mmqa_jax.core.files import settle

_TEMPLATE = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_INDEX}"
_FORMAT = "array_record"


class ShardSize(NamedTuple):
    """What TFDS records of a shard."""

    records: int
    bytes: int


class DatasetFiles:
    """The ArrayRecord files of one dataset, and their metadata.

    Args:
      folder: of these files; made where missing.
      column: name of the column beside `id`.
      text: whether that column is text; otherwise it is bytes.
      module: below mmqa_jax, named as the builder in the metadata; the name of the first version,
        for the files stay equal.
    """

    def __init__(self, folder: Path, column: str, *, text: bool, module: str):
        import numpy as np
        import tensorflow_datasets as tfds
        from tensorflow_datasets.core.example_serializer import ExampleSerializer

        folder.mkdir(exist_ok=True)
        self.folder, self.column = folder, column
        feature = tfds.features.Text()
        if not text:
            feature = tfds.features.Tensor(shape=(), dtype=np.object_)
        self._features = tfds.features.FeaturesDict({"id": tfds.features.Text(), column: feature})
        identity = tfds.core.dataset_info.DatasetIdentity(
            name=folder.name,
            version="1.0.0",
            data_dir=str(folder),
            module_name=f"mmqa_jax.{module}",
        )
        self._info = tfds.core.DatasetInfo(builder=identity, features=self._features)
        self._serializer = ExampleSerializer(self._features.get_serialized_info())

    def path(self, split: str, shard: int) -> Path:
        """File of a shard."""
        return Path(self._template(split).sharded_filepath(shard_index=shard, num_shards=None))

    def open_shard(self, split: str, shard: int) -> ShardWriter:
        """A new shard, under a temporary name until it is complete."""
        return ShardWriter(self, self.path(split, shard))

    def serialize(self, name: str, value: str | bytes) -> bytes:
        """A record: the example with these columns."""
        example = self._features.encode_example({"id": name, self.column: value})
        return self._serializer.get_tf_example(example).SerializeToString(deterministic=True)

    def finish(self, shards: Mapping[str, Sequence[ShardSize]]) -> None:
        """Writes the metadata: the sizes of every split's shards, in order."""
        from tensorflow_datasets.core import splits

        self._info.set_file_format(_FORMAT)
        infos = [
            splits.SplitInfo(
                name=split,
                shard_lengths=[size.records for size in sizes],
                num_bytes=sum(size.bytes for size in sizes),
                filename_template=self._template(split),
            )
            for split, sizes in shards.items()
        ]
        self._info.set_splits(splits.SplitDict(infos))
        self._info.write_to_directory(self.folder)

    def _template(self, split: str) -> Any:
        from tensorflow_datasets.core import naming

        return naming.ShardedFileTemplate(
            dataset_name=self.folder.name,
            data_dir=str(self.folder),
            split=split,
            filetype_suffix=_FORMAT,
            template=_TEMPLATE,
        )


class ShardWriter:
    """One file; the context manager keeps it if the block ends without an error."""

    def __init__(self, files: DatasetFiles, path: Path):
        from array_record.python.array_record_module import ArrayRecordWriter

        self._files, self._path = files, path
        self._temporary = path.with_name(f".{path.name}.tmp")
        self._writer = ArrayRecordWriter(str(self._temporary), "group_size:1")  # as TFDS does
        self._records = self._bytes = 0

    def add(self, name: str, value: str | bytes) -> None:
        """Writes one example."""
        record = self._files.serialize(name, value)
        self._writer.write(record)
        self._records += 1
        self._bytes += len(record)

    @property
    def size(self) -> ShardSize:
        """Size of what has been written."""
        return ShardSize(self._records, self._bytes)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._writer.close()
        settle(self._temporary, self._path, whole=kind is None)
