"""What one publisher decides once for all of its shards: boundary, windows, leases, recount,
requests, and what must outlive it. `coordinator` is pure; whoever runs it does the I/O."""
