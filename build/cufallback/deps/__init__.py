"""Dependencies: upstream's requirements, adapted; resolved to locks; held to the bans; fetched to a wheelhouse."""
