"""Recipes: one small file each, a function of the file's name that returns a `jaxpara.Run`. Most change another recipe."""
