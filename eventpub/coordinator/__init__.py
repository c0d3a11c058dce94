"""What one publisher decides once for all of its shards: boundary, windows, runners, recount,
requests, and what must outlive it. Everything here is pure but `boundary`, which one of the
publisher's worker threads uses."""
