"""What one publisher decides once for all of its shards: boundary, windows, leases, recount,
requests, and what must outlive it. Everything here is pure but `boundary` and `lag`, which the
publisher's worker threads use."""
