ls {{directory}} > {{target}}
