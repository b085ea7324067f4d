"""What tests/unraised.py takes for an error of the package."""

from __future__ import annotations

from tests.unraised import raises

SOURCE = """
def read(file):
    try:
        return open(file)
    except OSError as error:
        raise UserError(
            f"{file}: cannot be read; check the path."
        ) from error
    except ValueError:
        raise
    except KeyError as error:
        raise error
"""


def test_new_errors_are_found_with_all_their_lines():
    assert list(raises(SOURCE)) == [
        (range(6, 9), "UserError(f'{file}: cannot be read; check the path.')")
    ]
