"""What jaxpara says to people: the screens of a run, its progress, the tables of parameters and settings. No JAX."""
