"""What servers answer about sounds is of the types of those whose API it is."""

from tests.api.conftest import answers_are_of_their_types as answers_are_of_their_types
