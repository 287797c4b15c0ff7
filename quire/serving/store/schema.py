"""The tables of the store, and how an older store is brought up to date.

`VERSION` is written into the file (SQLite's `user_version`). A change adds a script to MIGRATIONS and never edits one.
"""

from __future__ import annotations

MIGRATIONS = (
    """
    CREATE TABLE responses (
        id TEXT PRIMARY KEY,
        used REAL NOT NULL,      -- when it was made, or last continued
        status TEXT NOT NULL,
        previous TEXT,           -- the response that it continues
        input BLOB NOT NULL,     -- JSON: the items that came with this response, not those of earlier ones
        body BLOB NOT NULL,      -- JSON: the response as clients see it
        owner TEXT               -- the process that works on it in the background
    );
    CREATE INDEX responses_by_age ON responses (used);

    CREATE TABLE response_events (
        response TEXT NOT NULL REFERENCES responses ON DELETE CASCADE,
        number INTEGER NOT NULL, -- the event's sequence_number
        data BLOB NOT NULL,      -- JSON
        PRIMARY KEY (response, number)
    ) WITHOUT ROWID;

    CREATE TABLE files (
        id TEXT PRIMARY KEY,
        created INTEGER NOT NULL,
        expires INTEGER NOT NULL,
        filename TEXT NOT NULL,
        purpose TEXT NOT NULL,
        size INTEGER NOT NULL,
        complete INTEGER NOT NULL,
        batch TEXT               -- the batch that writes it, until it is complete
    );
    CREATE TABLE file_parts (
        file TEXT NOT NULL REFERENCES files ON DELETE CASCADE,
        number INTEGER NOT NULL,
        data BLOB NOT NULL,
        PRIMARY KEY (file, number)
    );

    CREATE TABLE batches (
        id TEXT PRIMARY KEY,
        created INTEGER NOT NULL,
        expires INTEGER NOT NULL,
        model TEXT NOT NULL,     -- servers of this model work on it
        status TEXT NOT NULL,
        input_file TEXT NOT NULL,
        body BLOB NOT NULL,      -- JSON: the batch as clients see it, without its counts
        owner TEXT,              -- the process that works on it
        total INTEGER NOT NULL DEFAULT 0
    );
    CREATE TABLE batch_results (
        batch TEXT NOT NULL REFERENCES batches ON DELETE CASCADE,
        line INTEGER NOT NULL,   -- of the input file
        succeeded INTEGER NOT NULL,
        data BLOB NOT NULL,      -- JSON: the line of the output file or of the error file
        PRIMARY KEY (batch, line)
    );
    CREATE INDEX batch_results_by_kind ON batch_results (batch, succeeded, line);

    CREATE TABLE processes (
        id TEXT PRIMARY KEY,
        seen REAL NOT NULL       -- when it last said that it is alive
    );
    """,
)
VERSION = len(MIGRATIONS)
