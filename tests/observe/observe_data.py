"""Where the logs of real runs lie: events of an embedded run with evictions, and TaskVine's of a pool of four hosts."""

from pathlib import Path

RUN = Path(__file__).parent / "data" / "tree"
EVENTS = RUN / "events.jsonl"
STAGING = RUN / "taskvine" / "staging.jsonl"
[DEBUG] = RUN.glob("taskvine/*/vine-logs/debug")
