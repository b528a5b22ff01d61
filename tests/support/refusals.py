"""What a user's mistake has to look like."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from luffy.errors import EXIT_USER_ERROR, UserError


@contextmanager
def refused(*named: str, error: type[UserError] = UserError) -> Iterator[None]:
    """The block ends in a user's mistake: one line, exit code 2, that names each of these: a field, a number.

    The sentence around them is free to change.
    """
    with pytest.raises(error) as caught:
        yield
    line = str(caught.value)
    assert "\n" not in line and caught.value.exit_code == EXIT_USER_ERROR
    assert not [name for name in named if name not in line], line
