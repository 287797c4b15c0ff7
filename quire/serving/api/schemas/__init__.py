"""The JSON of requests, as checked types. Answers are built as plain data where they are made."""
