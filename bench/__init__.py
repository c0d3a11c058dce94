"""Measurements on real servers. Nothing in here asserts a speed.

`eventpub bench` runs them: `main` says which cases there are and how large, a module each has what
is done, `tables`, `plots`, `report` and `words` write it down, and `documents` puts the tables into
the documentation. What is counted is counted by a reader of the topic that shares nothing with the
publisher (`reader`, `compare`); what is visible is what the broker's last stable offset says
(`topic`). `raw_pipe`, `poller` and `debezium` are the peers.

Parts that run alone: ``python -m bench.drain`` and ``bench.raw_pipe``. ``bench.recount``,
``bench.simulate`` and ``bench.soak`` use the tests' harness, so they need a clone.
"""
