"""Where events come from: the protocol `Source`, and one package for each kind of database."""
